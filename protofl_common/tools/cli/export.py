"""Takes a site's trained model out of a run: weights, prototypes and a card that says what they are.

protofl export runs/20261121-103501-fedproto-mnist-4711 --site site-3 --out model
protofl export /var/lib/protofl/myrun --out model --onnx

RUN is the folder of a simulated run, or on a site's own machine the run's folder in its state-dir. A run has models
once its last round is evaluated. README.md beside the model says what it learnt from, its figures and what chose it.
"""

import argparse
import math
from pathlib import Path

from protofl_common.basics.files import write_text
from protofl_common.basics.text import in_order, numbered
from protofl_common.config.options import SettingsError
from protofl_common.config.python_names import is_python_name, module_of
from protofl_common.runs.folder import BEST, CARD, WEIGHTS, RunFolder
from protofl_common.tools import UNKNOWN_SHARE
from protofl_common.tools.cli.arguments import add_allow_python, run_named


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, or of a run in a site's state-dir")
    parser.add_argument("--site", default="", help="whose model; needless where there is but one")
    parser.add_argument("--best", action="store_true", help="the model of the best round, of a run with keep-best=true")
    parser.add_argument("--out", type=Path, default=Path("model"), help="folder to write to (default: model)")
    parser.add_argument("--unknown", type=float, default=UNKNOWN_SHARE, metavar="SHARE", help=_UNKNOWN)
    parser.add_argument("--onnx", action="store_true", help="also model.onnx; needs the packages of protofl[onnx]")
    add_allow_python(parser, "the model")


_UNKNOWN = f"share of inputs like the site's own that may be called unknown (default: {UNKNOWN_SHARE}); 0: never"


def act(arguments: argparse.Namespace) -> None:
    from protofl_common.maths.prototypes import unknown_above
    from protofl_common.models.trained import TrainedModel
    from protofl_common.tools.inference import card as about
    from protofl_common.tools.inference import onnx_file

    if not 0 <= arguments.unknown < 1:
        raise SettingsError(f"--unknown {arguments.unknown}: must be at least 0 and below 1")
    run = _run(arguments.run)
    model = TrainedModel.read(_chosen(run, arguments.site, BEST if arguments.best else WEIGHTS))
    limit = unknown_above(model.distances, arguments.unknown)
    written = [WEIGHTS, CARD, about.NAME]
    (arguments.out / onnx_file.NAME).unlink(missing_ok=True)  # of another model
    if arguments.onnx:
        onnx_file.write_onnx(model, arguments.out / onnx_file.NAME)
        written.append(onnx_file.NAME)
    model.export(arguments.out, limit)
    write_text(arguments.out / about.NAME, about.model_card(model, limit, RunFolder(run).summary()))
    card = model.card
    ways = ", ".join(f"{kind} {100 * share:.2f} %" for kind, share in card.accuracy.items())
    best = f", chosen as the best on {card.chosen_on} data" if card.chosen_on else ""
    flower = f" (Flower run {card.flower_run})" if card.flower_run else ""
    print(f"{card.site}: {card.arch}, {card.algorithm}, {card.run}{flower}, after round {card.round}{best}")
    print(f"  right of its {card.test_samples} test samples: {ways}; predicts by {card.inference}")
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


def _where(run: Path) -> str:
    summary = RunFolder(run).summary()
    if summary is None:
        return "give the folder of a finished run (it has clients/)"
    return (
        f"they stayed with its sites, {', '.join(in_order(summary['clients']))}: on a site's own machine\n"
        f"protofl export STATE-DIR/{run.resolve().name} --out model\n"
        "STATE-DIR is state-dir in its node config; else the folder runs where its SuperNode was started;\n"
        "if all ran on this machine, they were removed, as protofl table does without --keep-models"
    )


def models_in(run: Path, name: str = WEIGHTS) -> dict[str, Path]:
    if files := {file.parent.name: file for file in run.glob(f"clients/*/{name}")}:
        return files
    if name != WEIGHTS and any(run.glob(f"clients/*/{WEIGHTS}")):
        raise SettingsError(f"--best: {run} has no models of its best round; clients keep them with keep-best = true")
    raise SettingsError(f"{run}: no trained models in it; {_where(run)}")


def _chosen(run: Path, site: str, name: str) -> Path:
    files = models_in(run, name)
    names = ", ".join(in_order(files))
    if not site and len(files) > 1:
        raise SettingsError(f"{run} has the models of several sites; choose with --site: {names}")
    if site and site not in files:
        raise SettingsError(f"--site {site}: no such site in {run}; choose {names}")
    return files[site] if site else next(iter(files.values()))
