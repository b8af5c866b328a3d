"""Takes a site's trained model out of a run: weights, prototypes and a card that says what they
are.

protofl export runs/20261121-103501-fedproto-mnist-4711 --site site-3 --out model
protofl export /var/lib/protofl/myrun-4711 --out model --onnx

RUN is the folder of a simulated run, or on a site's own machine the run's folder in its state-dir.
A run has models once its last round is evaluated. README.md beside the model says from which data
it learnt, its figures, and by which data it was chosen.
"""

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from protofl_common.basics.files import write_text
from protofl_common.basics.text import in_order, printable
from protofl_common.config.options import SettingsError
from protofl_common.config.sections import keys_that_change
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.settings import default_run_config
from protofl_common.runs.figures import IN_MARKDOWN, Table
from protofl_common.runs.folder import BEST, CARD, WEIGHTS, RunFolder, Summary
from protofl_common.tools import UNKNOWN_SHARE
from protofl_common.tools.arguments import add_allow_python, run_named

if TYPE_CHECKING:
    from protofl_common.models.trained import ModelCard  # PyTorch, seconds

README = "README.md"
UNTESTED = "nothing measured: no test samples, or too few of each class (min-class-samples)"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "run", metavar="RUN", help="folder of a run, or of a run in a site's state-dir"
    )
    parser.add_argument("--site", default="", help="whose model; needless where there is but one")
    parser.add_argument(
        "--best",
        action="store_true",
        help="the model of the best round, of a run with keep-best=true",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("model"), help="folder to write to (default: model)"
    )
    parser.add_argument(
        "--unknown",
        type=float,
        default=UNKNOWN_SHARE,
        metavar="SHARE",
        help="share of inputs like the site's own that may be called unknown "
        f"(default: {UNKNOWN_SHARE}); 0: never",
    )
    parser.add_argument(
        "--onnx", action="store_true", help="also model.onnx; needs the packages of protofl[onnx]"
    )
    add_allow_python(parser, "the model")


def act(arguments: Namespace) -> None:
    """Write the model, its card and a README.md into the folder ``--out``, and print its facts."""
    from protofl_common.maths.prototypes import unknown_above
    from protofl_common.models.trained import TrainedModel
    from protofl_common.tools.inference import ONNX, write_onnx

    if not 0 <= arguments.unknown < 1:
        raise SettingsError(f"--unknown {arguments.unknown}: must be at least 0 and below 1")
    run = run_named(arguments.run)
    file = _model_file(run, arguments.site, BEST if arguments.best else WEIGHTS)
    model = TrainedModel.read(file)
    card = model.card
    limit = unknown_above(model.distances, arguments.unknown)

    written = [WEIGHTS, CARD, README]
    (arguments.out / ONNX).unlink(missing_ok=True)  # it may be of another model
    if arguments.onnx:
        write_onnx(model, arguments.out / ONNX)
        written.append(ONNX)
    model.export(arguments.out, limit)
    facts = _facts(card, RunFolder(run).summary())
    if math.isfinite(limit):  # infinite with --unknown 0, or where too few samples tell a limit
        facts["unknown"] = f"what is farther than {limit:.4g} from every prototype"
    page = PAGE.format(
        site=card.site,
        facts=_table(facts),
        noun=card.task.noun,
        says=card.task.says,
        figures=_figures(card),
    )
    write_text(arguments.out / README, page)

    for name, fact in (facts | _accuracies(card)).items():
        print(f"{name}: {printable(fact)}")
    print(f"{arguments.out}: {', '.join(written)}")
    print(f"try: protofl predict {arguments.out} FILE…")


def _accuracies(card: "ModelCard") -> dict[str, str]:
    """Say which share of the test samples each way to predict gets right, or why none is known."""
    if not card.test_samples:
        return {"right": UNTESTED}
    says_right = card.task.says_right
    what = "right" if says_right == "accuracy" else says_right
    return {f"{what} by {way}": f"{100 * share:.2f} %" for way, share in card.accuracy.items()}


def models_in(run: Path, name: str = WEIGHTS) -> dict[str, Path]:
    """Return the files called ``name`` of a run's models, by site.

    ``name`` is `WEIGHTS`, or `BEST` for the models of the best round. SettingsError if the run has
    none, which says where they may be.
    """
    files = {file.parent.name: file for file in run.glob(f"clients/*/{name}")}
    if files:
        return files
    if name != WEIGHTS and any(run.glob(f"clients/*/{WEIGHTS}")):
        raise SettingsError(
            f"--best: {run} has no models of its best round; clients keep them with "
            "keep-best = true"
        )
    where = "give the folder of a finished run (it has clients/)"
    summary = RunFolder(run).summary()
    if summary:
        sites = ", ".join(in_order(summary["clients"]))
        where = (
            f"they stayed with its sites, {sites}: on a site's own machine\n"
            f"protofl export STATE-DIR/{run.resolve().name}-NUMBER --out model\n"
            "STATE-DIR is state-dir in its node config, else the folder runs where its SuperNode "
            "was started, and NUMBER is that of the Flower run;\n"
            "if all ran on this machine, they were removed, as protofl table does without "
            "--keep-models"
        )
    raise SettingsError(f"{run}: no trained models in it; {where}")


def _model_file(run: Path, site: str, name: str) -> Path:
    """Return the file called ``name`` of a site's model; for "" that of the run's only model.

    SettingsError for a site without a model, and for "" where several sites have one.
    """
    files = models_in(run, name)
    names = ", ".join(in_order(files))
    if not site and len(files) > 1:
        raise SettingsError(f"{run} has the models of several sites; choose with --site: {names}")
    if site and site not in files:
        raise SettingsError(f"--site {site}: no such site in {run}; choose {names}")
    return files[site] if site else next(iter(files.values()))


# -- README.md
PAGE = """\
# A model of {site}

{facts}

## Intended use

Inputs like those of {site}, of the {noun} above; {says}.
Nothing has been measured of inputs from elsewhere, of other groups of people or devices, or of
later times. Measure on samples of your own before anything depends on it; it is no substitute for a
person's judgement.

`protofl predict FOLDER FILE…` predicts with it.

## Figures

{figures}
"""


def _facts(card: "ModelCard", summary: Summary | None) -> dict[str, str]:
    """Return what a model is, and what it learnt from, by headings for people.

    ``summary`` is that of its run, or None on a site's own machine, which has none.
    """
    network = card.arch
    if card.backbones:
        network += f", behind the frozen backbones {', '.join(card.backbones)}"
    row = CATALOG.get(card.algorithm)
    method = f"{row.title} ({row.paper})" if row else card.algorithm
    run = f"{card.run}, after round {card.round}"
    if card.chosen_on:
        run += f", chosen as the best on {card.chosen_on} data"
    if card.flower_run:
        run += f", Flower run {card.flower_run}"
    site = card.site
    if card.domain:
        site += f", of the domain {card.domain}"
    facts = {
        "network": network,
        "method": method,
        "run": run,
        "trained at": site,
        "inputs": f"{card.input_type} {list(card.input_shape)}",
        card.task.noun: f"{len(card.classes)}: {', '.join(card.classes)}",
        "predicts by": card.inference,
    }
    if summary:
        facts |= _facts_of_run(summary)
    return facts


def _facts_of_run(summary: Summary) -> dict[str, str]:
    """Return what a model's run was: its data, versions, and settings that are not the defaults.

    Settings are left out that cannot change what the model learnt, such as names of folders.
    """
    defaults = default_run_config()
    without_effect = keys_that_change("name", "machine", "waiting", "display")
    changed = []
    for key, value in summary["settings"].items():
        if key not in without_effect and value != defaults.get(key):
            changed.append(f"{key} = {value}")
    versions = [f"{name} {number}" for name, number in summary.get("versions", {}).items()]
    clients = f"{len(summary['clients'])} clients"
    return {
        "data": f"{summary['dataset']}, partition {summary['partition']}, {clients}",
        "settings that are not the defaults": ", ".join(changed) or "none",
        "versions": ", ".join(versions),
    }


def _figures(card: "ModelCard") -> str:
    """Return the text on a model's accuracy: on which samples, and what was chosen on which."""
    if not card.test_samples:
        return f"{card.site}: {UNTESTED}"
    when = "the last round"
    if card.chosen_on:
        when = f"the best round, chosen on {card.chosen_on} data"
    where = "these same test samples"
    if card.calibrated_on == "validation":
        where = "the site's validation samples"
    text = (
        f"On {card.test_samples} test samples of {card.site}, after {when}:\n\n"
        f"{_table(_accuracies(card))}\n\n"
        f"Chosen on {where}: that it predicts by {card.inference}, the scale of\n"
        "probabilities by prototype, and the limit of distance if there is one."
    )
    if "test" in (card.calibrated_on, card.chosen_on):
        text += "\nWhat was chosen on test data makes these figures a little too high."
    return text


def _table(facts: Mapping[str, str]) -> str:
    """Return a Markdown table of two columns, without heads."""
    rows = []
    for name, value in facts.items():
        # a stranger may have written it, such as the names of classes: no control characters, no
        # Markdown; nothing is cut
        text = printable(value, len(value)).translate(IN_MARKDOWN)
        rows.append((name, text))
    return "\n".join(Table(("", ""), rows, words=(0, 1)).as_markdown())
