"""Takes a site's trained model out of a run: weights, prototypes and a card that says what they are.

protofl export runs/20261121-103501-fedproto-mnist-4711 --site site-3 --out model
protofl export /var/lib/protofl/myrun --out model --onnx

RUN is the folder of a simulated run, or on a site's own machine the run's folder in its state-dir. A run has models
once its last round is evaluated. README.md beside the model says what it learnt from, its figures and what chose it.
"""

import argparse
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from protofl_common.basics.files import write_text
from protofl_common.basics.text import in_order, numbered, printable
from protofl_common.config.options import SettingsError
from protofl_common.config.python_names import is_python_name, module_of
from protofl_common.config.sections import keys_that_change
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.settings import default_run_config
from protofl_common.runs.figures import IN_MARKDOWN, Table
from protofl_common.runs.folder import BEST, CARD, WEIGHTS, RunFolder, Summary
from protofl_common.tools import UNKNOWN_SHARE
from protofl_common.tools.cli.arguments import add_allow_python, run_named

if TYPE_CHECKING:
    from protofl_common.models.trained import ModelCard  # PyTorch, seconds

README = "README.md"


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, or of a run in a site's state-dir")
    parser.add_argument("--site", default="", help="whose model; needless where there is but one")
    parser.add_argument("--best", action="store_true", help="the model of the best round, of a run with keep-best=true")
    parser.add_argument("--out", type=Path, default=Path("model"), help="folder to write to (default: model)")
    parser.add_argument("--unknown", type=float, default=UNKNOWN_SHARE, metavar="SHARE", help=_UNKNOWN)
    parser.add_argument("--onnx", action="store_true", help="also model.onnx; needs the packages of protofl[onnx]")
    add_allow_python(parser, "the model")


UNTESTED = "nothing measured: no test samples, or too few of each class (min-class-samples)"
_UNKNOWN = f"share of inputs like the site's own that may be called unknown (default: {UNKNOWN_SHARE}); 0: never"


def act(arguments: argparse.Namespace) -> None:
    from protofl_common.maths.prototypes import unknown_above
    from protofl_common.models.trained import TrainedModel
    from protofl_common.tools.inference import ONNX, write_onnx

    if not 0 <= arguments.unknown < 1:
        raise SettingsError(f"--unknown {arguments.unknown}: must be at least 0 and below 1")
    run = _run(arguments.run)
    model = TrainedModel.read(_chosen(run, arguments.site, BEST if arguments.best else WEIGHTS))
    limit, written = unknown_above(model.distances, arguments.unknown), [WEIGHTS, CARD, README]
    (arguments.out / ONNX).unlink(missing_ok=True)  # of another model
    if arguments.onnx:
        write_onnx(model, arguments.out / ONNX)
        written.append(ONNX)
    model.export(arguments.out, limit)
    write_text(arguments.out / README, _readme(model.card, limit, RunFolder(run).summary()))
    card = model.card
    ways = ", ".join(f"{kind} {100 * share:.2f} %" for kind, share in card.accuracy.items())
    best = f", chosen as the best on {card.chosen_on} data" if card.chosen_on else ""
    flower = f" (Flower run {card.flower_run})" if card.flower_run else ""
    print(f"{card.site}: {card.arch}, {card.algorithm}, {card.run}{flower}, after round {card.round}{best}")
    right = f"right of its {card.test_samples} test samples: {ways}" if card.test_samples else UNTESTED
    print(f"  {right}; predicts by {card.inference}")
    if model.prototypes is not None:
        few = f": its {len(model.distances)} samples are too few to find a limit" if arguments.unknown else ""
        far = f"farther than {limit:.4g} from every prototype" if math.isfinite(limit) else f"nothing{few}"
        print(f"  unknown: {far}")
    print(f"{arguments.out}: {', '.join(written)}")
    own = f" --allow-python {module_of(card.arch)}" if is_python_name(card.arch) else ""
    print(f"try: protofl predict {arguments.out} FILE…{own}")


def _run(named: Path) -> Path:
    """The run's folder; in a site's state-dir also by the run's name alone, where one Flower run has had it."""
    runs = {path.name: path for path in named.parent.glob("*") if (path / "clients").is_dir()}
    named_so = [runs[name] for name in numbered(named.name, runs)]
    if named.is_dir() or not named_so:
        return run_named(str(named))
    if len(named_so) > 1:
        names = ", ".join(str(path) for path in sorted(named_so, key=lambda path: path.stat().st_mtime))
        raise SettingsError(f"{named}: several Flower runs had this name; choose one, the latest is last: {names}")
    return named_so[0]


def models_in(run: Path, name: str = WEIGHTS) -> dict[str, Path]:
    if files := {file.parent.name: file for file in run.glob(f"clients/*/{name}")}:
        return files
    if name != WEIGHTS and any(run.glob(f"clients/*/{WEIGHTS}")):
        raise SettingsError(f"--best: {run} has no models of its best round; clients keep them with keep-best = true")
    where = "give the folder of a finished run (it has clients/)"
    if summary := RunFolder(run).summary():
        where = (
            f"they stayed with its sites, {', '.join(in_order(summary['clients']))}: on a site's own machine\n"
            f"protofl export STATE-DIR/{run.resolve().name} --out model\n"
            "STATE-DIR is state-dir in its node config, else the folder runs where its SuperNode was started;\n"
            "if all ran on this machine, they were removed, as protofl table does without --keep-models"
        )
    raise SettingsError(f"{run}: no trained models in it; {where}")


def _chosen(run: Path, site: str, name: str) -> Path:
    files = models_in(run, name)
    names = ", ".join(in_order(files))
    if not site and len(files) > 1:
        raise SettingsError(f"{run} has the models of several sites; choose with --site: {names}")
    if site and site not in files:
        raise SettingsError(f"--site {site}: no such site in {run}; choose {names}")
    return files[site] if site else next(iter(files.values()))


def _readme(card: "ModelCard", unknown_above: float, summary: Summary | None) -> str:
    """Say what a model is for, what it learnt from and what chose it; ``summary``: of its run, where it is at hand."""
    row = CATALOG.get(card.algorithm)
    facts = {
        "network": card.arch + (f", behind the frozen backbones {', '.join(card.backbones)}" if card.backbones else ""),
        "method": f"{row.title} ({row.paper})" if row else card.algorithm,
        "run": f"{card.run}, after round {card.round}" + (f", Flower run {card.flower_run}" if card.flower_run else ""),
        "trained at": card.site + (f", of the domain {card.domain}" if card.domain else ""),
        "inputs": f"{card.input_type} {list(card.input_shape)}",
        "classes": f"{len(card.classes)}: {', '.join(card.classes)}",
        **(_of_run(summary) if summary else {}),
    }
    head = [f"# A model of {card.site}", "", *_table(facts), ""]
    return "\n".join([*head, *_use(card, unknown_above), *_figures(card, unknown_above)])


def _of_run(summary: Summary) -> dict[str, str]:
    defaults, elsewhere = default_run_config(), keys_that_change("name", "machine", "waiting", "display")
    settings = {key: value for key, value in summary["settings"].items() if key not in elsewhere}
    changed = {key: value for key, value in settings.items() if value != defaults.get(key)}
    return {
        "data": f"{summary['dataset']}, partition {summary['partition']}, {len(summary['clients'])} clients",
        "settings that are not the defaults": ", ".join(f"{key} = {value}" for key, value in changed.items()) or "none",
        "versions": ", ".join(f"{name} {number}" for name, number in summary.get("versions", {}).items()),
    }


def _use(card: "ModelCard", unknown_above: float) -> Iterator[str]:
    yield from ("## Intended use", "")
    yield f"Inputs like those of {card.site}, of the classes above; every input is given one of them."
    if math.isfinite(unknown_above):
        yield f"An input farther than {unknown_above:.4g} from every prototype is called unknown."
    yield "Nothing has been measured of inputs from elsewhere, of other groups of people or devices, or of later times."
    yield "Measure on samples of your own before anything depends on it; it is no substitute for a person's judgement."
    yield from ("", "`protofl predict FOLDER FILE…` predicts with it.", "")


def _figures(card: "ModelCard", unknown_above: float) -> Iterator[str]:
    when = f"the best round, chosen on {card.chosen_on} data" if card.chosen_on else "the last round"
    if not card.test_samples:
        yield from ("## Figures", "", f"{card.site}: {UNTESTED}", "")
        return
    yield from ("## Figures", "", f"On {card.test_samples} test samples of {card.site}, after {when}:", "")
    yield from _table({f"right by {way}": f"{100 * share:.2f} %" for way, share in card.accuracy.items()})
    yield ""
    where = "the site's validation samples" if card.calibrated_on == "validation" else "these same test samples"
    limit = ", and the limit above which an input is unknown" if math.isfinite(unknown_above) else ""
    yield f"Chosen on {where}: that it predicts by {card.inference}, the scale of"
    yield f"probabilities by prototype{limit}."
    if "test" in (card.calibrated_on, card.chosen_on):
        yield "What was chosen on test data makes these figures a little too high."
    yield ""


def _table(facts: Mapping[str, str]) -> Iterator[str]:
    """The values are texts of a stranger, such as names of classes."""
    rows = [(name, printable(value, len(value)).translate(IN_MARKDOWN)) for name, value in facts.items()]
    return Table(("", ""), rows, words=(0, 1)).as_markdown()
