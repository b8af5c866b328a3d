"""Attack the messages of a finished simulation by membership inference.

  protofl audit runs/20261121-103501-fedproto-mnist-4711

The attacker has the prototypes that each client sent last, that client's model, and candidates: its training samples
and its test samples, which come from the same source. For each class of each client:

    prototypes   the nearer a candidate's features are to a prototype that the client sent for the class, the likelier
    weights      the surer the model is of the candidate's class, the likelier; where the algorithm sends weights

An advantage of 0 is guessing, 1 names every member. The page of the run shows the findings when it is drawn again. The
model is the one that the client was left with, in a simulation; of a private model that is more than the server has.
Other attacks may find more: chance here is no proof of safety.
"""

import argparse
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from protofl_common.basics.files import write_text
from protofl_common.basics.text import in_order
from protofl_common.config.options import SettingsError
from protofl_common.data import UNLABELLED, ClientData, open_client_data
from protofl_common.experiment.settings import Settings, default_run_config
from protofl_common.maths.gaussian import ClassMoments
from protofl_common.maths.prototypes import Prototypes, class_means, distances
from protofl_common.models.trained import TrainedModel
from protofl_common.privacy.release import large_enough, stated_samples
from protofl_common.report.reading import AUDIT, RecordedRun
from protofl_common.runs.figures import audit_table
from protofl_common.runs.folder import WEIGHTS, RunFolder
from protofl_common.tools.cli.arguments import add_allow_python, run_named
from protofl_common.tools.inference import Predictor
from protofl_common.wire.schema import Moments, weights_in
from server_app.checkpoint import newest_whole
from server_app.strategies.gaussian import SAMPLES, Sent, sent_in

SIZES = {"1 to 3": (1, 3), "4 to 9": (4, 9), "10 and more": (10, 10**9), "all": (1, 10**9)}  # of training samples
Floats = NDArray[np.float64]


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a run, or its name in runs/")
    add_allow_python(parser, "the run", backbones=True)


def act(arguments: argparse.Namespace) -> None:
    Console().print(audit_table(audit(run_named(arguments.run), arguments.allow_backbones)).on_terminal())


class Candidates(NamedTuple):
    """Scores of samples of one class, higher for likelier members of one client's training data."""

    members: Floats  # [n]
    others: Floats  # [m], of the same class and origin

    @property
    def auc(self) -> float:
        """The chance that a member scores above another; a tie counts half."""
        return float((np.sign(self.members[:, None] - self.others[None, :]).mean() + 1) / 2)


class Finding(NamedTuple):
    """The result of an attack over the classes of all clients."""

    classes: int  # groups of candidates
    advantage: float  # 2 · AUC − 1, averaged by members: 0 for guessing, 1 for naming all
    error: float  # its standard deviation under guessing: that of the Mann-Whitney statistic
    named: int  # classes whose likeliest candidate is a member
    by_chance: float  # how many that is for guessing

    @property
    def above_chance(self) -> bool:
        """Return whether guessing does as well in fewer than 1 of 1000 audits (three deviations)."""
        return self.advantage > 3 * self.error


def finding(groups: Iterable[Candidates]) -> Finding | None:
    """All groups together; None without any that has members and others."""
    if not (sound := [group for group in groups if len(group.members) and len(group.others)]):
        return None
    sizes = np.array([(len(group.members), len(group.others)) for group in sound], dtype=float)
    weights = sizes[:, 0] / sizes[:, 0].sum()
    variances = 4 * (sizes.sum(axis=1) + 1) / (12 * sizes.prod(axis=1))
    return Finding(
        classes=len(sound),
        advantage=float(weights @ [2 * group.auc - 1 for group in sound]),
        error=math.sqrt(float(weights**2 @ variances)),
        named=sum(bool(group.members.max() > group.others.max()) for group in sound),
        by_chance=float((sizes[:, 0] / sizes.sum(axis=1)).sum()),
    )


Scored = tuple[str, int, Candidates]  # attack, training samples of the class, scores


def audit(folder: Path, allow_backbones: str = "") -> list[dict[str, Any]]:
    """Attack a finished simulation, and leave the findings for its page; SettingsError where a part is not here."""
    run = RecordedRun(folder)
    settings = Settings.from_run_config(default_run_config() | run.settings)
    RunFolder(folder).check_division(settings.data.partition)
    if settings.privacy.sums_only:
        raise SettingsError(f"{folder}: nothing to attack: with secure aggregation no message is that of one client")
    of_moments = any(isinstance(entry, Moments) for entry in settings.exchange.up.values())
    scored, noisy = list[Scored](), None
    if of_moments and settings.privacy.dp != "none":
        noisy = sent_in(newest_whole(folder, without=f"{folder}: no folder of a run").state)
    for number, site in enumerate(in_order(run.sites)):
        data, predictor = _of_site(run, settings, number, site, allow_backbones)
        means = _class_means(folder, settings, site, data, predictor, noisy) if of_moments else _sent(run, site)
        scored += _scores(data, predictor, means, settings)
    rows = []
    for attack in dict.fromkeys(attack for attack, _, _ in scored):
        for size, (least, most) in SIZES.items():
            found = finding(one for name, samples, one in scored if name == attack and least <= samples <= most)
            if found is not None:
                rows.append({"attack": attack, "samples": size, **found._asdict(), "above_chance": found.above_chance})
    if not rows:
        raise SettingsError(f"{folder}: nothing to attack: no prototypes or weights, or no test samples")
    write_text(folder / AUDIT, json.dumps(rows, indent=2) + "\n")
    return rows


def _of_site(run: RecordedRun, settings: Settings, number: int, site: str, allow: str) -> tuple[ClientData, Predictor]:
    file = run.folder / "clients" / site / WEIGHTS
    if site != f"site-{number}" or not file.exists():
        raise SettingsError(f"{file}: no model of the client; give a finished simulation with all its clients")
    data = open_client_data(settings.data, seed=settings.run.seed, partition=number, num_partitions=len(run.sites))
    if stated_samples(data.train_labels, settings.privacy) != run.sites[site].get("train-samples"):
        raise SettingsError(f"{run.folder}: {site} has other data here than in the run")
    return data, Predictor(TrainedModel.read(file), allow=allow)


def _class_means(
    folder: Path, settings: Settings, site: str, data: ClientData, predictor: Predictor, noisy: Sent | None
) -> Prototypes:
    """The class means among the moments of frozen features that a client sent; ``noisy``: what the server stored."""
    if noisy is not None:
        if (stored := noisy.get(site)) is None:
            raise SettingsError(f"{folder}: what {site} sent, with noise, is not stored; set gaussian.revocable = true")
        moments = ClassMoments.of({name: value for name, value in stored.items() if name != SAMPLES})
        present = moments.shares > 0
        return Prototypes(moments.means()[present].float(), torch.nonzero(present).flatten())
    features_NF, labels_N = predictor.values(data.train_inputs).cpu(), torch.from_numpy(data.train_labels)
    labelled = labels_N != UNLABELLED
    means = class_means(features_NF[labelled], labels_N[labelled].long(), len(data.classes))
    return large_enough(means, settings.privacy.min_class_samples)


def _sent(run: RecordedRun, site: str) -> Prototypes | None:
    stored = run.client_prototypes
    if stored is None or site not in stored.sites:
        return None
    rows = stored.owners == stored.sites.index(site)
    return Prototypes(torch.from_numpy(stored.values[rows]).float(), torch.from_numpy(stored.labels[rows]))


@torch.no_grad()
def _scores(data: ClientData, predictor: Predictor, sent: Prototypes | None, settings: Settings) -> Iterator[Scored]:
    labels_N = np.concatenate([data.train_labels, data.test_labels])
    member_N = np.arange(len(labels_N)) < len(data.train_labels)
    values = [predictor.values(part) for part in (data.train_inputs, data.test_inputs)]
    features_ND = torch.cat([predictor.model.body(part) for part in values]).cpu()
    logits_NC = predictor.model.head(features_ND)
    sends_weights = any(not isinstance(entry, Moments) for entry in weights_in(settings.exchange.up).values())
    for label in np.unique(data.train_labels[data.train_labels >= 0]).tolist():
        chosen = torch.from_numpy(np.flatnonzero(labels_N == label))
        scores: dict[str, Tensor] = {}
        if sent is not None and bool((own := sent.labels == label).any()):
            space = features_ND if sent.means.shape[1] == features_ND.shape[1] else torch.cat(values).cpu()
            if settings.privacy.dp != "none":
                space = space.renorm(2, 0, settings.privacy.dp_feature_clip)  # as each sample counted
            of_class = Prototypes(sent.means[own], sent.labels[own])
            scores["prototypes"] = -distances(space[chosen], of_class, predictor.card.similarity).amin(1)
        if sends_weights:
            scores["weights"] = logits_NC[chosen].log_softmax(1)[:, label]
        inside = member_N[chosen.numpy()]
        for attack, score in scores.items():
            numbers = score.double().numpy()
            yield attack, int(inside.sum()), Candidates(numbers[inside], numbers[~inside])
