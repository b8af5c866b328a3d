"""Membership inference against a run's own messages: what somebody who has them could say of its training samples.

The attacker has the prototypes that each client sent last, that client's model, and candidates: its training samples
and its test samples, which come from the same source. Two attacks, for each class of each client:

    prototypes   the nearer a candidate's features are to a prototype that the client sent for the class, the likelier
    weights      the surer the model is of the candidate's class, the likelier; where the algorithm sends weights

The model is the one that the client was left with, in a simulation; of a private model that is more than the server
has. Other attacks may find more: chance here is no proof of safety.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from protofl_common.config.options import SettingsError
from protofl_common.datasets import ClientData, open_client_data
from protofl_common.files import write_text
from protofl_common.models.trained import TrainedModel
from protofl_common.privacy.membership import Candidates, Finding, finding
from protofl_common.prototypes import Prototypes, distances
from protofl_common.report.reading import AUDIT, Run, read_run
from protofl_common.run_folder import WEIGHTS
from protofl_common.settings import Settings, default_run_config
from protofl_common.text import in_order
from protofl_common.tools.inference.predictor import Predictor
from protofl_common.wire.schema import Weights

SIZES = {"1 to 3": (1, 3), "4 to 9": (4, 9), "10 and more": (10, 10**9), "all": (1, 10**9)}
"""Training samples of a class -> the bounds."""
Scored = tuple[str, int, Candidates]
"""Attack, training samples of the class, scores."""


def audit(folder: Path) -> list[dict[str, Any]]:
    """Attack the run in ``folder``, a finished simulation; the findings, which are left there for its page.

    SettingsError where its clients' models or data are not here.
    """
    run = read_run(folder)
    settings = Settings.from_run_config(default_run_config() | run.settings)
    sites = enumerate(in_order(run.sites))
    scored = [one for number, site in sites for one in _of_site(run, settings, folder, number, site)]
    rows = []
    for attack in dict.fromkeys(attack for attack, _, _ in scored):
        for size, (least, most) in SIZES.items():
            found = finding(one for name, samples, one in scored if name == attack and least <= samples <= most)
            if found is not None:
                rows.append({"attack": attack, "samples": size, **_figures(found)})
    if not rows:
        raise SettingsError(f"{folder}: nothing to attack: no prototypes or weights, or no test samples")
    write_text(folder / AUDIT, json.dumps(rows, indent=2) + "\n")
    return rows


def _figures(found: Finding) -> dict[str, Any]:
    return dataclasses.asdict(found) | {"above_chance": found.above_chance}


def _of_site(run: Run, settings: Settings, folder: Path, number: int, site: str) -> Iterator[Scored]:
    file = folder / "clients" / site / WEIGHTS
    if site != f"site-{number}" or not file.exists():
        raise SettingsError(f"{file}: no model of the client; give a finished simulation with all its clients")
    data = open_client_data(settings.data, seed=settings.run.seed, partition=number, num_partitions=len(run.sites))
    if len(data.train_labels) != run.sites[site].get("train-samples"):
        raise SettingsError(f"{folder}: {site} has other data here than in the run")
    yield from _scores(data, Predictor(TrainedModel.read(file)), _sent(run, site), settings)


def _sent(run: Run, site: str) -> Prototypes | None:
    """The prototypes that a client sent last."""
    kept = run.client_prototypes
    if kept is None or site not in kept.sites:
        return None
    rows = kept.owners == kept.sites.index(site)
    return Prototypes(torch.from_numpy(kept.values[rows]).float(), torch.from_numpy(kept.labels[rows]))


@torch.inference_mode()
def _scores(data: ClientData, predictor: Predictor, sent: Prototypes | None, settings: Settings) -> Iterator[Scored]:
    labels_N = np.concatenate([data.train_labels, data.test_labels])
    member_N = np.arange(len(labels_N)) < len(data.train_labels)
    values = [predictor.values(part) for part in (data.train_inputs, data.test_inputs)]
    features_ND = torch.cat([predictor.model.body(part) for part in values]).cpu()
    logits_NC = predictor.model.head(features_ND)
    sends_weights = any(isinstance(entry, Weights) for entry in settings.exchange.up.values())
    for label in np.unique(data.train_labels[data.train_labels >= 0]).tolist():
        chosen = torch.from_numpy(np.flatnonzero(labels_N == label))
        scores: dict[str, Tensor] = {}
        if sent is not None and bool((own := sent.labels == label).any()):
            space = features_ND if sent.means.shape[1] == features_ND.shape[1] else torch.cat(values).cpu()
            of_class = Prototypes(sent.means[own], sent.labels[own])
            scores["prototypes"] = -distances(space[chosen], of_class, predictor.card.similarity).amin(1)
        if sends_weights:
            scores["weights"] = logits_NC[chosen].log_softmax(1)[:, label]
        inside = member_N[chosen.numpy()]
        for attack, found in scores.items():
            numbers = found.double().numpy()
            yield attack, int(inside.sum()), Candidates(numbers[inside], numbers[~inside])
