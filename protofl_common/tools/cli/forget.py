"""Take a site out of the result of a run, as if it had not taken part: Gaussian heads only.

  protofl forget runs/20261121-103501-gaussian-mnist-4711 --site site-3 --by "letter of 3 May"

The run must have stored what each site sent (gaussian.revocable = true). What the site sent is
removed from the run's folder, the head is computed from what is left, and forgotten.jsonl says
when, by whose request, and who is left. The models of simulated clients have the new head. Sites
with operators get it from a run with gaussian.start-from. What the run has measured stays on its
page, with the site's name.
"""

import getpass
import json
import time
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from typing import cast

from torch import Tensor

from protofl_common.algorithms.gaussian import GaussianHparams
from protofl_common.basics.text import in_order
from protofl_common.config.options import SettingsError
from protofl_common.experiment.settings import Settings, default_run_config
from protofl_common.maths.gaussian import ClassMoments, GaussianHead
from protofl_common.models.trained import TrainedModel
from protofl_common.runs.folder import BEST, WEIGHTS, RunFolder
from protofl_common.tools.arguments import add_allow_python, run_named
from protofl_common.wire.payloads import StateDict
from server_app.run.checkpoint import locked_run, newest_undamaged
from server_app.strategies.gaussian import Sent, pooled, sent_in

RECORD = "forgotten.jsonl"
MOST_OF_NAME = 100  # characters of the run's name: a card takes 200, with the note
NOTE = ", less forgotten sites; figures are from before that"
"""It follows the run's name on the card of a model with a new head."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a run, or its name in runs/")
    parser.add_argument("--site", required=True, help="the site that withdraws")
    by = "by whose request, for the record (default: your user name)"
    parser.add_argument("--by", default="", help=by)
    add_allow_python(parser, "the run")


def act(arguments: Namespace) -> None:
    """Take a site out of the newest checkpoint and the models of a run, and print who is left.

    Older checkpoints are removed, as they still have what the site sent.
    """
    run = run_named(arguments.run)
    site = arguments.site
    with locked_run(run):
        checkpoint = newest_undamaged(run, complaint=f"{run}: no folder of a run")
        settings = Settings.from_run_config(default_run_config() | checkpoint.settings)
        sent = sent_in(checkpoint.state)
        _check_can_be_taken_out(settings, sent, site)

        hparams = cast(GaussianHparams, settings.hparams)
        own_priors: StateDict = {}
        if hparams.priors == "personal":  # a client's priors are its own shares of the classes
            own_priors = {name: tensors["shares"] for name, tensors in sent.items()}
        del sent[site]
        moments, counts_C = pooled(sent, settings)
        models = _refit_models(run, moments, counts_C, own_priors, hparams.shrinkage)
        _record(run, site, arguments.by or getpass.getuser(), left=in_order(sent))

        state = {}
        for key, value in checkpoint.state.items():
            if not key.startswith(f"sent/{site}/"):
                state[key] = value
        state |= {f"moments/{name}": value for name, value in moments.items()}
        state["counts_C"] = counts_C
        replace(checkpoint, state=state).write(run)
        for older in RunFolder(run).checkpoints()[1:]:
            older.unlink()

    print(f"{site}: taken out; left: {', '.join(in_order(sent))}")
    print(f"{run}: {RECORD}, checkpoint, {models} models with the new head")


def _record(run: Path, site: str, by: str, left: list[str]) -> None:
    """Append to the run's forgotten.jsonl that ``by`` had the site taken out, and who is left."""
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    facts = {"time": now, "by": by, "site": site, "left": left}
    with (run / RECORD).open("a", encoding="utf-8") as record:
        record.write(json.dumps(facts, ensure_ascii=False) + "\n")


def _check_can_be_taken_out(settings: Settings, sent: Sent, site: str) -> None:
    """Raise SettingsError where the server cannot take ``site`` out of the run's result.

    ``sent``: what the server has stored of each site.
    """
    again = f"make the run again without {site}"
    if settings.run.algo != "gaussian":
        why = "only the sums of gaussian can be divided"
        raise SettingsError(f"algo = {settings.run.algo!r}: {why}; {again}")
    if settings.privacy.sums_only:
        raise SettingsError(
            "with secure aggregation the server has the sum of all sites and nothing of one; "
            f"sites refuse a sum without {site} alone, as the difference would show what it sent"
        )
    if not sent:
        why = "what each site sent is not stored"
        raise SettingsError(f"gaussian.revocable = false: {why}; {again}")
    if site not in sent:
        raise SettingsError(f"--site {site}: not in the result; choose {', '.join(in_order(sent))}")
    if len(sent) == 1:
        raise SettingsError(f"--site {site}: nobody else is left; remove the run's folder")


def _refit_models(
    run: Path, moments: StateDict, counts_C: Tensor, own_priors: StateDict, shrinkage: float
) -> int:
    """Fit the heads of all models in the run's folder to the moments that are left, in place.

    Return the number of models. ``own_priors`` has the class priors [C] of each client whose head
    uses its own; the others' heads use those of the moments.
    """
    files = [*run.glob(f"clients/*/{WEIGHTS}"), *run.glob(f"clients/*/{BEST}")]
    for file in files:
        trained = TrainedModel.read(file)
        model = trained.build()
        priors_C = own_priors.get(trained.card.site, moments["shares"])
        head = cast(GaussianHead, model.head)
        task = trained.card.task
        over_classes = ClassMoments.of(moments).over_classes(task.classes_of_a_sample)
        head.fit(over_classes, counts_C, priors_C, shrinkage, task.combined)
        earlier_name = trained.card.run.removesuffix(NOTE)  # of an earlier site that was taken out
        name = earlier_name[:MOST_OF_NAME] + NOTE
        card = replace(trained.card, run=name)
        replace(trained, weights=model.state_dict(), card=card).write(file)
    return len(files)
