"""After the last round: the model as it was evaluated, left in this site's own folder for ``protofl export``.

Nothing of it travels. Whether it can be written changes nothing for the federation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from client_app.algorithms.base import ClientAlgorithm
from client_app.evaluation import local_features
from client_app.failures import log
from client_app.site import Site
from client_app.state import StateFolder
from protofl_common.models.calibration import class_scores, fit_temperature
from protofl_common.models.split import SplitModel
from protofl_common.models.trained import ModelCard, TrainedModel
from protofl_common.prototypes import Prototypes, distances
from protofl_common.run_folder import WEIGHTS
from protofl_common.tensorfile import TensorFileError
from protofl_common.wire.records import Instructions


def hand_over(
    site: Site,
    algorithm: ClientAlgorithm[Any],
    states: StateFolder,
    prototypes: Prototypes | None,
    correct: dict[str, int],
    instructions: Instructions,
) -> None:
    """Leave the model, and the ``prototypes`` that predict; ``correct``: test samples that each way got right."""
    model, test_distances, temperature = algorithm.evaluation_model(), torch.empty(0), 1.0
    prototypes = prototypes if prototypes is not None and len(prototypes) else None
    if prototypes is not None and len(site.test_set):
        test_distances, temperature = _calibrated(site, model, prototypes, algorithm.similarity)
    tested = len(site.test_set)
    data, settings = site.data, site.settings
    card = ModelCard(
        run=instructions.run_name,
        site=site.name,
        domain=data.domain,
        algorithm=settings.run.algo,
        round=instructions.round,
        arch=site.arch,
        input_shape=tuple(data.test_inputs.shape[1:]),
        input_type=str(data.test_inputs.dtype),
        mean=tuple(data.mean),
        std=tuple(data.std),
        backbones=settings.backbones,
        features_in=site.input_shape[0] if settings.backbones else 0,
        feature_dim=settings.model.feature_dim,
        classes=data.classes,
        inference="prototype" if correct.get("prototype", -1) >= correct.get("head", -1) else "head",
        similarity=algorithm.similarity,
        accuracy={kind: right / max(1, tested) for kind, right in correct.items()},
        test_samples=tested,
        temperature=temperature,
    )
    trained = TrainedModel(card, model.state_dict(), prototypes, test_distances)
    try:
        if site.real:
            _keep_former(states.folder / WEIGHTS, site.run_id)
        trained.write(states.folder / WEIGHTS)
    except (TensorFileError, OSError) as error:
        log("ERROR", f"the trained model was not left for use: {error}")


def _keep_former(path: Path, run_id: int) -> None:
    """A model that is there already stays, under another name: a server may name any run of before."""
    aside = path.with_name(f"{path.stem}-before-{run_id}{path.suffix}")
    if path.exists() and not aside.exists():
        path.rename(aside)


def _calibrated(site: Site, model: SplitModel, prototypes: Prototypes, similarity: str) -> tuple[Tensor, float]:
    """Distances [n] of the test samples from their nearest prototypes, ascending, and T of the probabilities."""
    test = site.test_set
    features = local_features(model, test, site.settings.training.eval_batch_size).to(site.device)
    distances_NP = distances(features, prototypes, similarity).cpu()
    scores = class_scores(distances_NP, prototypes.labels.cpu(), site.num_classes)
    return distances_NP.amin(1).sort().values, fit_temperature(scores, test.labels.cpu())
