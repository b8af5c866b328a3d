"""The model as it was evaluated, left in this site's own folder for ``protofl export``.

That is after the last round, and with ``keep-best`` at every evaluation. Nothing of it travels. Whether it can be
written changes nothing for the federation.
"""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from client_app.algorithms.base import ClientAlgorithm
from client_app.answers import log
from client_app.client import Client
from client_app.data import Samples
from client_app.evaluation import Evaluation, features_of
from client_app.state import StateFolder
from protofl_common.basics.tensorfile import TensorFileError
from protofl_common.config.options import SettingsError
from protofl_common.maths.prototypes import Prototypes, distances
from protofl_common.models.calibration import class_scores, fit_temperature
from protofl_common.models.split import SplitModel
from protofl_common.models.trained import ModelCard, TrainedModel
from protofl_common.runs.folder import BEST, WEIGHTS
from protofl_common.wire.records import Instructions


def leave_model(
    client: Client,
    algorithm: ClientAlgorithm[Any],
    instructions: Instructions,
    prototypes: Prototypes | None,
    evaluations: tuple[Evaluation, Evaluation],
    best: int | None = None,
) -> None:
    """Leave the model as it was evaluated on test and validation samples, and the ``prototypes`` that predict.

    In a round, for which ``best`` names the best so far: with ``keep-best``, leave it as that after the round before,
    and remove all others but the best. How a model predicts, T and when an input is unknown are chosen on validation
    samples, where there are any, else on test samples.
    """
    if best is not None and not client.settings.run.keep_best:
        return
    folder, after = client.states(instructions).folder, instructions.round - (best is not None)
    name = WEIGHTS if best is None else _evaluated(after)
    if best is not None:
        _forget_all_but(client, folder, best)
    model, own_distances, temperature = algorithm.evaluation_model(), torch.empty(0), 1.0
    prototypes = prototypes if prototypes is not None and len(prototypes) else None
    validated = len(client.validation_set) > 0
    own, right = (client.validation_set, evaluations[1]) if validated else (client.test_set, evaluations[0])
    if prototypes is not None and len(own):
        own_distances, temperature = _calibrated(client, model, prototypes, algorithm.similarity, own)
    tested, data, settings = len(client.test_set), client.data, client.settings
    card = ModelCard(
        run=instructions.run_name,
        flower_run=str(client.run_id),
        site=client.name,
        domain=data.domain,
        algorithm=settings.run.algo,
        round=after,
        arch=algorithm.evaluation_arch,
        input_shape=tuple(data.test_inputs.shape[1:]),
        input_type=str(data.test_inputs.dtype),
        mean=tuple(data.mean),
        std=tuple(data.std),
        fill=data.fill,
        columns=data.columns,
        backbones=settings.backbones,
        features_in=client.input_shape[0] if settings.backbones else 0,
        feature_dim=settings.model.feature_dim,
        classes=data.classes,
        inference="prototype" if right.correct.get("prototype", -1) >= right.correct.get("head", -1) else "head",
        similarity=algorithm.similarity,
        accuracy=evaluations[0].accuracies(tested),
        test_samples=tested,
        temperature=temperature,
        calibrated_on="validation" if validated else "test",
        chosen_on="",
    )
    try:
        if client.node.is_site:
            _keep_former(folder / name, client.run_id)
        TrainedModel(card, model.state_dict(), prototypes, own_distances).write(folder / name)
    except (TensorFileError, OSError) as error:
        log("ERROR", f"the trained model was not left for use: {error}")


def _keep_former(path: Path, run_id: int) -> None:
    """A model that is there already stays, under another name: a server may name any run of before."""
    aside = path.with_name(f"{path.stem}-before-{run_id}{path.suffix}")
    if path.exists() and not aside.exists():
        path.rename(aside)
        log("WARNING", f"the model that was there stays, as {aside}")


def _forget_all_but(client: Client, folder: Path, best: int) -> None:
    if client.node.is_site:
        _keep_former(folder / BEST, client.run_id)
    for file in (*folder.glob(_evaluated("*")), folder / BEST):
        if file.name != _evaluated(best):
            file.unlink(missing_ok=True)


def choose_best(states: StateFolder, best: int, on: str) -> None:
    """Name the model of the ``best`` round, chosen ``on`` which data, and remove the others that were kept for that."""
    chosen = [states.folder / name for name in (_evaluated(best), WEIGHTS)]
    for file in chosen:
        with suppress(SettingsError):
            model = TrainedModel.read(file)
            if model.card.round == best:
                if states.wary:
                    _keep_former(states.folder / BEST, states.run_history.run_id)
                replace(model, card=replace(model.card, chosen_on=on)).write(states.folder / BEST)
                break
    else:
        log("ERROR", f"there is no model of round {best}, which was the best")
    for file in states.folder.glob(_evaluated("*")):
        file.unlink(missing_ok=True)


def _evaluated(after: int | str) -> str:
    return f"evaluated-{after}.safetensors"


def _calibrated(
    client: Client, model: SplitModel, prototypes: Prototypes, similarity: str, own: Samples
) -> tuple[Tensor, float]:
    """Distances [n] of ``own`` samples from their nearest prototypes, ascending, and T of the probabilities."""
    features_ND = features_of(model, own, client.settings.training.eval_batch_size).to(client.device)
    distances_NP = distances(features_ND, prototypes, similarity).cpu()
    scores_NC = class_scores(distances_NP, prototypes.labels.cpu(), client.num_classes)
    return distances_NP.amin(1).sort().values, fit_temperature(scores_NC, own.labels.cpu())
