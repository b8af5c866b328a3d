"""Attack the messages of a finished simulation by membership inference.

  protofl audit runs/20261121-103501-fedproto-mnist-4711

The attacker has the prototypes that each client sent last, that client's model, and candidates: its
training samples and its test samples, which come from the same source. For each class of each
client:

    prototypes   the nearer a candidate's features are to a prototype that the client sent for the
                 class, the likelier
    weights      the surer the model is of the candidate's class, the likelier; where the algorithm
                 sends weights

An advantage of 0 is guessing, 1 names every member. The page of the run shows the findings when it
is drawn again. The model is the one that the client was left with, in a simulation; of a private
model that is more than the server has. Other attacks may find more: chance here is no proof of
safety.
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
from protofl_common.data import ClientData, open_client_data
from protofl_common.experiment.settings import Settings, default_run_config
from protofl_common.maths.gaussian import ClassMoments
from protofl_common.maths.prototypes import Prototypes, class_means, distances
from protofl_common.models.trained import TrainedModel
from protofl_common.privacy.release import large_enough, stated_samples
from protofl_common.report.reading import AUDIT, RecordedRun
from protofl_common.runs.figures import audit_table
from protofl_common.runs.folder import WEIGHTS, RunFolder
from protofl_common.tasks import UNLABELLED
from protofl_common.tools.arguments import add_allow_python, run_named
from protofl_common.tools.inference import Predictor
from protofl_common.wire.schema import Moments, weights_in
from server_app.run.checkpoint import newest_undamaged
from server_app.strategies.gaussian import SAMPLES, Sent, sent_in

SIZES = {
    "1 to 3": (1, 3),
    "4 to 9": (4, 9),
    "10 and more": (10, 10**9),
    "all": (1, 10**9),
}  # training samples of a class, from and to
Floats = NDArray[np.float64]


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a run, or its name in runs/")
    add_allow_python(parser, "the run", backbones=True)


def act(arguments: argparse.Namespace) -> None:
    rows = audit(run_named(arguments.run), arguments.allow_backbones)
    Console().print(audit_table(rows).on_terminal())


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
        """Whether guessing does as well in fewer than 1 of 1000 audits (three deviations)."""
        return self.advantage > 3 * self.error


def finding(groups: Iterable[Candidates]) -> Finding | None:
    """Judge all groups together; None without any that has members and others."""
    sound = [group for group in groups if len(group.members) and len(group.others)]
    if not sound:
        return None
    sizes = np.array([(len(group.members), len(group.others)) for group in sound], dtype=float)
    members = sizes[:, 0]
    candidates = sizes.sum(axis=1)
    weights = members / members.sum()
    variances = 4 * (candidates + 1) / (12 * sizes.prod(axis=1))
    return Finding(
        classes=len(sound),
        advantage=float(weights @ [2 * group.auc - 1 for group in sound]),
        error=math.sqrt(float(weights**2 @ variances)),
        named=sum(bool(group.members.max() > group.others.max()) for group in sound),
        by_chance=float((members / candidates).sum()),
    )


class Scored(NamedTuple):
    """The candidates of one class of one client, scored by an attack."""

    attack: str
    samples: int  # training samples of the class
    candidates: Candidates


def audit(folder: Path, allow_backbones: str = "") -> list[dict[str, Any]]:
    """Attack a finished simulation, and leave the findings for its page.

    SettingsError where a part of the simulation is not here.
    """
    run = RecordedRun(folder)
    settings = Settings.from_run_config(default_run_config() | run.settings)
    RunFolder(folder).check_division(settings.data.partition)
    if settings.data.task != "single-label":
        raise SettingsError(
            f"{folder}: the attacks compare samples of one class; those of this run have several"
            " labels, and nothing here attacks these"
        )
    if settings.privacy.dp == "person":
        raise SettingsError(
            f"{folder}: the attacks look for single samples; dp = 'person' protects persons as a"
            " whole, and nothing here attacks these"
        )
    if settings.privacy.sums_only:
        raise SettingsError(
            f"{folder}: nothing to attack: with secure aggregation no message is that of one client"
        )
    sends_moments = any(isinstance(entry, Moments) for entry in settings.exchange.up.values())
    noisy = None
    if sends_moments and settings.privacy.dp != "none":
        noisy = sent_in(newest_undamaged(folder, complaint=f"{folder}: no folder of a run").state)

    scored: list[Scored] = []
    for number, site in enumerate(in_order(run.sites)):
        data, predictor = _of_site(run, settings, number, site, allow_backbones)
        sent: Prototypes | None
        if sends_moments:
            sent = _class_means(folder, settings, site, data, predictor, noisy)
        else:
            sent = _sent(run, site)
        scored += _scores(data, predictor, sent, settings)

    rows = _findings(scored)
    if not rows:
        raise SettingsError(
            f"{folder}: nothing to attack: no prototypes or weights, or no test samples"
        )
    write_text(folder / AUDIT, json.dumps(rows, indent=2) + "\n")
    return rows


def _findings(scored: list[Scored]) -> list[dict[str, Any]]:
    """A row for each attack and size of a class that has candidates."""
    rows = []
    for attack in dict.fromkeys(one.attack for one in scored):
        for size, (least, most) in SIZES.items():
            groups = []
            for one in scored:
                if one.attack == attack and least <= one.samples <= most:
                    groups.append(one.candidates)
            found = finding(groups)
            if found is not None:
                row = {"attack": attack, "samples": size, **found._asdict()}
                rows.append({**row, "above_chance": found.above_chance})
    return rows


def _of_site(
    run: RecordedRun, settings: Settings, number: int, site: str, allow: str
) -> tuple[ClientData, Predictor]:
    """The data and the model of a simulated client; SettingsError where they are not here."""
    file = run.folder / "clients" / site / WEIGHTS
    if site != f"site-{number}" or not file.exists():
        raise SettingsError(
            f"{file}: no model of the client; give a finished simulation with all its clients"
        )
    data = open_client_data(
        settings.data, seed=settings.run.seed, partition=number, num_partitions=len(run.sites)
    )
    stated = stated_samples(data.task, data.train_labels, settings.privacy)
    if stated != run.sites[site].get("train-samples"):
        raise SettingsError(f"{run.folder}: {site} has other data here than in the run")
    return data, Predictor(TrainedModel.read(file), allow=allow)


def _class_means(
    folder: Path,
    settings: Settings,
    site: str,
    data: ClientData,
    predictor: Predictor,
    noisy: Sent | None,
) -> Prototypes:
    """The class means among the moments of frozen features that a client sent.

    ``noisy``: what the server stored.
    """
    if noisy is not None:
        stored = noisy.get(site)
        if stored is None:
            raise SettingsError(
                f"{folder}: what {site} sent, with noise, is not stored; set "
                "gaussian.revocable = true"
            )
        tensors = {name: value for name, value in stored.items() if name != SAMPLES}
        moments = ClassMoments.of(tensors)
        present_C = moments.shares > 0
        labels_P = torch.nonzero(present_C).flatten()
        return Prototypes(moments.means()[present_C].float(), labels_P)

    features_NF = predictor.values(data.train_inputs).cpu()
    labels_N = torch.from_numpy(data.train_labels)
    labelled_N = labels_N != UNLABELLED
    means = class_means(features_NF[labelled_N], labels_N[labelled_N].long(), len(data.classes))
    return large_enough(means, settings.privacy.min_class_samples)


def _sent(run: RecordedRun, site: str) -> Prototypes | None:
    """The prototypes that a client sent last, if any."""
    stored = run.client_prototypes
    if stored is None or site not in stored.sites:
        return None
    rows = stored.owners == stored.sites.index(site)
    means = torch.from_numpy(stored.values[rows]).float()
    return Prototypes(means, torch.from_numpy(stored.labels[rows]))


@torch.no_grad()
def _scores(
    data: ClientData, predictor: Predictor, sent: Prototypes | None, settings: Settings
) -> Iterator[Scored]:
    """Yield the scores of each attack on each class that the client has training samples of."""
    labels_N = np.concatenate([data.train_labels, data.test_labels])
    is_member_N = np.arange(len(labels_N)) < len(data.train_labels)
    values = [predictor.values(part) for part in (data.train_inputs, data.test_inputs)]
    features_ND = torch.cat([predictor.model.body(part) for part in values]).cpu()
    logits_NC = predictor.model.head(features_ND)
    weights = weights_in(settings.exchange.up).values()
    sends_weights = any(not isinstance(entry, Moments) for entry in weights)

    for label in np.unique(data.train_labels[data.train_labels >= 0]).tolist():
        chosen = torch.from_numpy(np.flatnonzero(labels_N == label))
        scores: dict[str, Tensor] = {}
        own = None if sent is None else sent.only(sent.labels == label)
        if own is not None and len(own):
            space = features_ND
            if own.means.shape[1] != features_ND.shape[1]:  # they are of frozen features
                space = torch.cat(values).cpu()
            if settings.privacy.dp != "none":
                space = space.renorm(2, 0, settings.privacy.dp_feature_clip)  # as each counted
            similarity = predictor.card.similarity
            scores["prototypes"] = -distances(space[chosen], own, similarity).amin(1)
        if sends_weights:
            scores["weights"] = logits_NC[chosen].log_softmax(1)[:, label]

        is_member = is_member_N[chosen.numpy()]
        for attack, score in scores.items():
            numbers = score.double().numpy()
            candidates = Candidates(numbers[is_member], numbers[~is_member])
            yield Scored(attack, int(is_member.sum()), candidates)
