"""Attack the messages of a finished simulation by membership inference.

  protofl audit runs/20261121-103501-fedproto-mnist-4711

The attacker has the prototypes that each client sent last, that client's model, and candidates: its
training samples and its test samples, which come from the same source. For each class of each
client:

    prototypes   a candidate is the likelier a training sample, the nearer its features are to a
                 prototype that the client sent for the class
    weights      if the algorithm sends weights: a candidate is the likelier a training sample, the
                 surer the model is of its class

An advantage of 0 is guessing; an advantage of 1 names every training sample. The page of the run
shows the findings when it is drawn again. The attacker's model is the one that the client had at
the end of the simulation; if the model is private, the server has less. Other attacks may find
more: a result of 0 is no proof of safety.
"""

import json
import math
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
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


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a run, or its name in runs/")
    add_allow_python(parser, "the run", backbones=True)


def act(arguments: Namespace) -> None:
    """Audit the run, and print the findings as a table."""
    rows = audit(run_named(arguments.run), arguments.allow_backbones)
    audit_table(rows).show()


class Candidates(NamedTuple):
    """Scores of samples of one class, higher for likelier members of one client's training data."""

    members: Floats  # [n], of the client's training samples
    others: Floats  # [m], of its test samples

    @property
    def auc(self) -> float:
        """Return the chance that a member scores above a non-member; a tie counts half."""
        signs_NM = np.sign(self.members[:, None] - self.others[None, :])  # 1, 0 for a tie, or -1
        return float((signs_NM.mean() + 1) / 2)


class Finding(NamedTuple):
    """The result of an attack over the classes of all clients."""

    classes: int  # with candidates, each class counted once for each client
    advantage: float  # 2 · AUC − 1, averaged by members: 0 for guessing, 1 for naming all
    error: float  # standard deviation of the advantage under guessing
    named: int  # classes whose likeliest candidate is a member
    by_chance: float  # how many classes guessing would name

    @property
    def above_chance(self) -> bool:
        """True above three deviations, as guessing is in about 1 of 700 audits."""
        return self.advantage > 3 * self.error


def finding(groups: Iterable[Candidates]) -> Finding | None:
    """Judge an attack by its scores of all groups of candidates, each of one class of one client.

    The advantage is the mean over the groups, weighted by their members. Groups that lack members
    or others are left out; None if there is no other group.
    """
    usable = [group for group in groups if len(group.members) and len(group.others)]
    if not usable:
        return None
    sizes = np.array([(len(group.members), len(group.others)) for group in usable], dtype=float)
    members = sizes[:, 0]
    candidates = sizes.sum(axis=1)
    weights = members / members.sum()
    # AUC is the Mann-Whitney statistic U divided by n · m; by guessing U varies by
    # n · m · (n + m + 1) / 12, and so 2 · AUC − 1 by 4 · (n + m + 1) / (12 · n · m)
    variances = 4 * (candidates + 1) / (12 * sizes.prod(axis=1))
    return Finding(
        classes=len(usable),
        advantage=float(weights @ [2 * group.auc - 1 for group in usable]),
        error=math.sqrt(float(weights**2 @ variances)),
        named=sum(bool(group.members.max() > group.others.max()) for group in usable),
        by_chance=float((members / candidates).sum()),
    )


def audit(folder: Path, allow_backbones: str = "") -> list[dict[str, Any]]:
    """Attack a finished simulation, and write the findings into its folder, for the run's page.

    Return a row for each attack and size of class. SettingsError where a part of the simulation is
    missing, or nothing was sent that these attacks could use. ``allow_backbones`` names frozen
    backbones that the models may read or download.
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
    noisy_moments = None
    if sends_moments and settings.privacy.dp != "none":
        # the noise in them cannot be computed anew from a client's data
        checkpoint = newest_undamaged(folder, complaint=f"{folder}: no folder of a run")
        noisy_moments = sent_in(checkpoint.state)

    of_attacks: dict[str, list[Candidates]] = defaultdict(list)
    for number, site in enumerate(in_order(run.sites)):
        data, predictor = _data_and_model(run, settings, number, site, allow_backbones)
        sent: Prototypes | None
        if sends_moments:
            sent = _class_means_sent(folder, settings, site, data, predictor, noisy_moments)
        else:
            sent = _prototypes_sent(run, site)
        for attack, candidates in _scores(data, predictor, sent, settings):
            of_attacks[attack].append(candidates)

    rows = _rows(of_attacks)
    if not rows:
        raise SettingsError(
            f"{folder}: nothing to attack: no prototypes or weights, or no test samples"
        )
    write_text(folder / AUDIT, json.dumps(rows, indent=2) + "\n")
    return rows


def _rows(of_attacks: dict[str, list[Candidates]]) -> list[dict[str, Any]]:
    """Return a row for each attack and range of class sizes (`SIZES`) that has candidates."""
    rows = []
    for attack, groups in of_attacks.items():
        for sizes, (least, most) in SIZES.items():
            result = finding(group for group in groups if least <= len(group.members) <= most)
            if result is not None:
                row = {"attack": attack, "samples": sizes, **result._asdict()}
                rows.append({**row, "above_chance": result.above_chance})
    return rows


def _data_and_model(
    run: RecordedRun, settings: Settings, number: int, site: str, allow: str
) -> tuple[ClientData, Predictor]:
    """Open the data and the model of the simulated client with this ``number``, from 0.

    ``allow`` names frozen backbones that the model may read or download. SettingsError for a client
    that was not simulated, or whose model is gone or whose data have changed.
    """
    file = run.folder / "clients" / site / WEIGHTS
    is_simulated = site == f"site-{number}"  # a client with an operator has another name
    if not is_simulated or not file.exists():
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


def _class_means_sent(
    folder: Path,
    settings: Settings,
    site: str,
    data: ClientData,
    predictor: Predictor,
    noisy: Sent | None,
) -> Prototypes:
    """Return the class means among the moments of frozen features that a client sent.

    Of a run with noise, ``noisy`` has the moments that the server stored of each client;
    SettingsError if it stored none of this one. Where it is None, nothing had noise, and the means
    are computed anew from the client's data.
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
        present_C = moments.shares > 0  # the others have no mean
        labels_P = torch.nonzero(present_C).flatten()
        return Prototypes(moments.means()[present_C].float(), labels_P)

    features_NF = predictor.values(data.train_inputs).cpu()
    labels_N = torch.from_numpy(data.train_labels)
    is_labelled_N = labels_N != UNLABELLED
    features_LF = features_NF[is_labelled_N]
    means = class_means(features_LF, labels_N[is_labelled_N].long(), len(data.classes))
    # means of classes with few samples do not leave a client
    return large_enough(means, settings.privacy.min_class_samples)


def _prototypes_sent(run: RecordedRun, site: str) -> Prototypes | None:
    """Return the prototypes that a client sent last, as the server kept them; None without any."""
    stored = run.prototypes
    if stored is None or site not in stored.sites:
        return None
    rows = stored.arrays["owners"] == stored.sites.index(site)
    means = torch.from_numpy(stored.arrays["means"][rows]).float()
    return Prototypes(means, torch.from_numpy(stored.arrays["labels"][rows]))


@torch.no_grad()
def _scores(
    data: ClientData, predictor: Predictor, sent: Prototypes | None, settings: Settings
) -> Iterator[tuple[str, Candidates]]:
    """Score the training and test samples of a client, for each of its classes, by each attack.

    Classes without training samples are left out. A higher score is a likelier member. ``sent`` are
    the client's prototypes, which "prototypes" attacks unless it sent none (None). "weights"
    attacks the model where the algorithm sends weights.
    """
    labels_N = np.concatenate([data.train_labels, data.test_labels])
    is_member_N = np.arange(len(labels_N)) < len(data.train_labels)
    model_inputs = [predictor.values(part) for part in (data.train_inputs, data.test_inputs)]
    features_ND = torch.cat([predictor.model.body(part) for part in model_inputs]).cpu()
    logits_NC = predictor.model.head(features_ND)
    # class moments travel as weights do, but the head made of them is that of all clients
    weights = weights_in(settings.exchange.up).values()
    sends_weights = any(not isinstance(entry, Moments) for entry in weights)

    is_labelled_N = data.train_labels >= 0
    for label in np.unique(data.train_labels[is_labelled_N]).tolist():
        chosen = torch.from_numpy(np.flatnonzero(labels_N == label))
        scores: dict[str, Tensor] = {}
        sent_of_class = None if sent is None else sent.only(sent.labels == label)
        if sent_of_class is not None and len(sent_of_class):
            points_ND = features_ND
            if sent_of_class.means.shape[1] != features_ND.shape[1]:
                # the prototypes are of the frozen backbones' features, the inputs of this model
                points_ND = torch.cat(model_inputs).cpu()
            if settings.privacy.dp != "none":
                # the client cut each sample's features to this norm before their mean was taken
                points_ND = points_ND.renorm(2, 0, settings.privacy.dp_feature_clip)
            similarity = predictor.card.similarity
            distances_NP = distances(points_ND[chosen], sent_of_class, similarity)
            scores["prototypes"] = -distances_NP.amin(1)
        if sends_weights:
            scores["weights"] = logits_NC[chosen].log_softmax(1)[:, label]

        is_member = is_member_N[chosen.numpy()]
        for attack, score in scores.items():
            numbers = score.double().numpy()
            yield attack, Candidates(numbers[is_member], numbers[~is_member])
