"""Writes the evaluated model into the client's own folder, for ``protofl export``.

That happens after the last round, and with ``keep-best`` at every evaluation. The file is not sent,
and a failure to write it does not affect the federation.
"""

from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict

from client_app.algorithms.base import ClientAlgorithm
from client_app.learning.evaluation import Evaluation, features_of
from client_app.site.client import Client, open_client
from client_app.site.log import log
from client_app.site.workshop import Workshop
from protofl_common.basics.files import TensorFileError
from protofl_common.config.options import SettingsError
from protofl_common.maths.prototypes import Prototypes, distances
from protofl_common.models.trained import ModelCard, TrainedModel
from protofl_common.runs.folder import BEST, WEIGHTS
from protofl_common.wire.records import unpack_best


@dataclass(frozen=True)
class EvaluatedModel:
    """An algorithm with its model, the prototypes that predict beside its head, and the figures."""

    work: Workshop
    algorithm: ClientAlgorithm[Any]
    prototypes: Prototypes | None = None
    tested: Evaluation = field(default_factory=Evaluation)
    validated: Evaluation = field(default_factory=Evaluation)


def export_model(evaluated: EvaluatedModel, name: str, trained_in: int) -> None:
    """Write the model with prototypes and card, as a file ``name`` in the client's folder.

    ``trained_in`` is the round that trained it last. Failure is logged, and not raised.
    """
    algorithm = evaluated.algorithm
    client = evaluated.work.client
    prototypes = evaluated.prototypes
    if prototypes is not None and not len(prototypes):
        prototypes = None
    own_distances, temperature = _calibrated(evaluated, prototypes)
    weights = algorithm.evaluation_model().state_dict()
    card = _card(evaluated, trained_in, temperature)
    model = TrainedModel(card, weights, prototypes, own_distances)
    path = client.states.folder / name
    try:
        _keep_former(client, path)
        model.write(path, durable=client.node.is_site)
    except (TensorFileError, OSError) as error:
        log("ERROR", f"the trained model was not left for use: {error}")


def _card(evaluated: EvaluatedModel, trained_in: int, temperature: float) -> ModelCard:
    """Return the card of a model: where it is from, its inputs, how it predicts and how well.

    It predicts by prototypes if these are as often right as its head, on validation samples or else
    on test samples.
    """
    algorithm = evaluated.algorithm
    work = evaluated.work
    client = work.client
    data = work.data
    settings = client.settings
    has_validation = len(work.validation_set) > 0
    correct = (evaluated.validated if has_validation else evaluated.tested).correct
    # -1 for a kind of prediction that the model lacks; where it has neither figure, prototypes
    # predict
    by_prototype = correct.get("prototype", -1) >= correct.get("head", -1)
    return ModelCard(
        run=client.instructions.run_name,
        flower_run=str(client.run_id),
        site=client.name,
        domain=data.domain,
        algorithm=settings.run.algo,
        round=trained_in,
        arch=algorithm.evaluation_arch,
        input_shape=tuple(data.test_inputs.shape[1:]),
        input_type=str(data.test_inputs.dtype),
        mean=tuple(data.mean),
        std=tuple(data.std),
        fill=data.fill,
        columns=data.columns,
        backbones=settings.backbones,
        features_in=work.input_shape[0] if settings.backbones else 0,
        feature_dim=settings.model.feature_dim,
        classes=data.classes,
        task_kind=work.task.kind,
        inference="prototype" if by_prototype else "head",
        similarity=algorithm.similarity,
        accuracy=evaluated.tested.accuracies(len(work.test_set)),
        test_samples=len(work.test_set),
        temperature=temperature,
        calibrated_on="validation" if has_validation else "test",
        chosen_on="",
    )


def _calibrated(
    evaluated: EvaluatedModel, prototypes: Prototypes | None
) -> tuple[torch.Tensor, float]:
    """Return each sample's distance from the nearest prototype, and a softmax temperature.

    The distances [N] are in ascending order. The temperature calibrates the probabilities that
    follow from distances. Both are measured on validation samples, or else on test samples; without
    prototypes or samples they are [] and 1.
    """
    algorithm = evaluated.algorithm
    work = evaluated.work
    samples = work.validation_set if len(work.validation_set) else work.test_set
    if prototypes is None or not len(samples):
        return torch.empty(0), 1.0

    batch_size = work.settings.training.eval_batch_size
    features_ND = features_of(algorithm.evaluation_model(), samples, batch_size)
    distances_NP = distances(features_ND.to(work.device), prototypes, algorithm.similarity).cpu()
    scores_NO = work.task.scores(distances_NP, prototypes.labels.cpu())
    nearest_N = distances_NP.amin(1).sort().values
    return nearest_N, work.task.temperature(scores_NO, samples.labels.cpu())


def _keep_former(client: Client, path: Path) -> None:
    """At a site, rename a model that is there already, so that it is not overwritten.

    A server may give a run the name of any earlier run. Only the first file in a Flower run is
    renamed, as later ones are this run's own.
    """
    new_path = path.with_name(f"{path.stem}-before-{client.run_id}{path.suffix}")
    if client.node.is_site and path.exists() and not new_path.exists():
        path.rename(new_path)
        log("WARNING", f"the model that was there stays, as {new_path}")


def export_best(evaluated: EvaluatedModel) -> None:
    """With ``keep-best``, write the evaluated model, and remove the earlier ones of this run.

    Only that of the best round so far stays, which the message names. Models of other Flower runs
    stay. The model was trained by the round before this one.
    """
    client = evaluated.work.client
    if not client.settings.run.keep_best:
        return
    folder = client.states.folder
    best, _ = unpack_best(client.content)
    _keep_former(client, folder / BEST)
    for file in (*folder.glob(_file_name("*", client.run_id)), folder / BEST):
        if file.name != _file_name(best, client.run_id):
            file.unlink(missing_ok=True)
    trained_in = client.instructions.round - 1
    export_model(evaluated, _file_name(trained_in, client.run_id), trained_in)


def choose_best(message: Message, context: Context) -> RecordDict:
    """Rename the model of the best round to `BEST`, and remove the others of this Flower run.

    The message names the round, and the part of the data on which it was the best. Where no model
    of that round is there, the log says so.
    """
    client = open_client(context, message)
    folder = client.states.folder
    best, chosen_on = unpack_best(client.content)

    # it was evaluated in round `best + 1`, by the Flower run to which that round belongs; the model
    # of the last round has the name `WEIGHTS`
    run_history = client.instructions.run_history
    run_ids = [run_id for run_id in run_history.run_ids if run_history.counts(run_id, best + 1)]
    for name in (*(_file_name(best, run_id) for run_id in run_ids), WEIGHTS):
        with suppress(SettingsError):  # no such file, or a damaged one
            model = TrainedModel.read(folder / name)
            if model.card.round == best:
                _keep_former(client, folder / BEST)
                chosen = replace(model, card=replace(model.card, chosen_on=chosen_on))
                chosen.write(folder / BEST)
                break
    else:
        log("ERROR", f"there is no model of round {best}, which was the best")

    for file in folder.glob(_file_name("*", client.run_id)):
        file.unlink(missing_ok=True)
    return RecordDict()


def _file_name(trained_in: int | str, run_id: int | str) -> str:
    """Return the name of the file of a model that a round has trained and the next evaluated.

    With "*" for the round it is a pattern for the files of all rounds.
    """
    return f"evaluated-{trained_in}-{run_id}.safetensors"
