"""The ClientApp: open the client, evaluate, train, protect, reply.

One exchange per round carries all of it.
"""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from client_app.algorithms.base import ClientAlgorithm, build_half
from client_app.answers import answered
from client_app.introduction import introduction
from client_app.learning.data import Samples
from client_app.learning.evaluation import Evaluation, evaluate
from client_app.learning.training import TrainingError, for_epochs
from client_app.protections import PROTECTIONS, names, protections_of
from client_app.protections.base import Protections, Query, Reply
from client_app.site.client import Client, open_client
from client_app.site.log import log
from client_app.site.workshop import Workshop, open_workshop
from client_app.trained_model import EvaluatedModel, choose_best, export_best, export_model
from protofl_common.maths.prototypes import Prototypes, chosen
from protofl_common.models.devices import seed_torch
from protofl_common.runs.folder import WEIGHTS
from protofl_common.wire import records
from protofl_common.wire.payloads import Payload, pack_payload, unpack_payload
from protofl_common.wire.schema import RefusedMessage

app = ClientApp()


@app.train()
@answered
def train(message: Message, context: Context) -> RecordDict:
    """Answer a training message: evaluate the model received, train it, and return the upload."""
    clock = Stopwatch()
    work, algorithm = begin(message, context)
    client = work.client
    clock.lap("load")

    with algorithm.protections.recorded():  # from here on, an error is an answer, too
        evaluated = EvaluatedModel(work, algorithm)
        if client.evaluates:
            evaluated = evaluate_model(work, algorithm)
            clock.lap("evaluate")
            export_best(evaluated)
        state_before = {} if client.reports_failed_training else algorithm.packed_state()
        losses = fit(algorithm)
        clock.lap("train")
        upload = algorithm.upload()
        clock.lap("prototypes")
        algorithm.privacy.check_answer(algorithm.all_modules, upload)
        save_state(client, algorithm, state_before)
        clock.lap("save")
        return pack_reply(evaluated, upload, losses, clock.seconds)


@app.evaluate()
@answered
def final_evaluation(message: Message, context: Context) -> RecordDict:
    """Answer the final evaluation, and write the model into this client's folder.

    A new client, which no round has trained, first trains for ``new-client-epochs``. Only its
    figures leave it.
    """
    clock = Stopwatch()
    work, algorithm = begin(message, context)
    client = work.client
    clock.lap("load")

    with algorithm.protections.recorded():
        epochs = client.settings.federation.new_client_epochs
        if work.is_new and epochs:
            algorithm.training = for_epochs(client.settings.training, epochs)
            fit(algorithm)
            clock.lap("train")
        evaluated = evaluate_model(work, algorithm)
        clock.lap("evaluate")
        export_model(evaluated, WEIGHTS, client.instructions.round)
        client.states.finish(client.instructions.round)
        clock.lap("save")
        return pack_reply(evaluated, Payload(), {}, clock.seconds)


QUERIES: dict[str, Query] = {
    "default": introduction,  # before the first round; Flower's name for a query without one
    "best": choose_best,  # after the final evaluation: which round was the best
}
for protection in PROTECTIONS:
    QUERIES |= protection.queries
for name, handler in QUERIES.items():
    app.query(name)(answered(handler))


def begin(message: Message, context: Context) -> tuple[Workshop, ClientAlgorithm[Any]]:
    """Take up a question, in this order: all that comes before a sample is used for the answer."""
    client = open_client(context, message)  # a site's operator has agreed to the run by now
    work = open_workshop(client)  # data, device and model are read when they are first used
    protections = protections_of(work)
    protections.admit()  # one reply to each question
    algorithm = restored(work, protections)  # with its state of the last round
    receive(algorithm, work)
    protections.receive()
    work.load_data()
    protections.charge()  # the ledger, before a sample is used
    return work, algorithm


class Stopwatch:
    """Measures the seconds of the phases of an answer; each begins where the one before ended."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = now - self.last
        self.last = now


def restored(work: Workshop, protections: Protections) -> ClientAlgorithm[Any]:
    """Return the client's half of the algorithm, with its stored state if it has any.

    The state is that of the last round that the run history counts. A site that lacks the newest
    one says so in its log and goes on; a simulated client raises LostStateError. RefusedMessage
    under secure aggregation where a site would begin with a new model although it has an older
    one.
    """
    client = work.client
    instructions = client.instructions
    # half of an algorithm from another package may draw from PyTorch's own generator
    seed_torch(client.seed_for("visit", instructions.round))
    algorithm = build_half(work, instructions.round, protections)
    _log_beginning(client)
    if not algorithm.lasting:
        return algorithm

    # training starts from the rounds before this one, the final evaluation from this one, too
    before = instructions.round + (0 if client.trains_now else 1)
    state = client.states.load(before, client.arch, work.device, instructions.counted)
    if state is not None:
        tensors, last_round = state
        algorithm.restore(tensors, last_round)
        if client.node.is_site and last_round < instructions.counted:
            log(
                "WARNING",
                f"run {client.run_id}: the newest model in state-dir is of round {last_round},"
                f" older than round {instructions.counted}, the last that counted; it goes on"
                " from it",
            )
        return algorithm
    has_no_earlier_round = before == 1
    if has_no_earlier_round or not client.node.is_site:
        return algorithm
    if client.settings.privacy.secagg and client.states.find_uncounted_state(before):
        raise RefusedMessage(
            f"round.run_history is {instructions.run_history.text!r}, by which none counts: this"
            " site has models of earlier rounds, and begins with no new one under secure"
            " aggregation"
        )
    log(
        "WARNING",
        f"run {client.run_id}: no model of an earlier round in state-dir; it begins with a new one",
    )
    return algorithm


def _log_beginning(client: Client) -> None:
    """In the first round of a Flower run, say in a site's log that it begins or goes on.

    The line names the protections that act.
    """
    if not (client.node.is_site and client.trains_now):
        return
    instructions = client.instructions
    last_round = 0  # of the Flower runs before this one
    if instructions.run_history.earlier:
        _, last_round = instructions.run_history.earlier[-1]
    is_first_of_this_run = instructions.round == last_round + 1
    if is_first_of_this_run:
        log(
            "INFO",
            f"run {instructions.run_name} ({client.run_id}) {client.states.describe_beginning()};"
            f" protections: {names(client.settings, is_site=True)}",
        )


def receive(algorithm: ClientAlgorithm[Any], work: Workshop) -> None:
    """Give the algorithm the server's payload.

    Its modules may leave in the state that they have then, as no sample has been used yet.
    RefusedMessage for a payload that is not as declared.
    """
    declared = work.settings.exchange.down
    limits = work.limits(algorithm.templates(declared))
    payload = unpack_payload(work.client.content, declared, limits, required=False)
    algorithm.receive(payload)
    algorithm.privacy.begin(algorithm.all_modules)


def evaluate_model(work: Workshop, algorithm: ClientAlgorithm[Any]) -> EvaluatedModel:
    """Evaluate the model on test and validation samples, by its head and by prototypes.

    With ``predict-among = "own"`` only prototypes of the client's own large classes predict.
    """
    prototypes = algorithm.prototypes_for_prediction()
    if prototypes is not None and work.settings.training.predict_among == "own":
        prototypes = chosen(prototypes, work.large_classes.to(work.device))
    validated = Evaluation()
    if len(work.validation_set):
        validated = _figures(work, algorithm, work.validation_set, prototypes)
    tested = _figures(work, algorithm, work.test_set, prototypes, validated.thresholds)
    return EvaluatedModel(work, algorithm, prototypes, tested, validated)


def _figures(
    work: Workshop,
    algorithm: ClientAlgorithm[Any],
    data: Samples,
    prototypes: Prototypes | None,
    thresholds: Mapping[str, np.ndarray] | None = None,
) -> Evaluation:
    """Return the figures of the algorithm's model on samples, with these ``thresholds``.

    A simulated client of a data set with uneven classes adds balanced accuracy to its metrics.
    """
    settings = work.settings
    adds_balanced = work.data.has_uneven_classes and not work.client.node.is_site
    return evaluate(
        algorithm.evaluation_model(),
        data,
        settings.training.eval_batch_size,
        work.task,
        prototypes,
        similarity=algorithm.similarity,
        with_head=algorithm.predicts_with_head,
        metrics=settings.reported_metrics if adds_balanced else settings.metrics,
        least=settings.privacy.min_class_samples,
        thresholds=thresholds,
    )


def fit(algorithm: ClientAlgorithm[Any]) -> dict[str, float]:
    """Train as the algorithm does, and return the mean of each loss term.

    TrainingError where the algorithm's `fit` returns anything else.
    """
    losses = algorithm.fit()
    if not isinstance(losses, dict):
        raise TrainingError(
            f"{type(algorithm).__name__}.fit() returned {type(losses).__name__}, not a dictionary"
            " with the mean of each loss term"
        )
    return losses


def save_state(
    client: Client, algorithm: ClientAlgorithm[Any], state_before: Mapping[str, Tensor]
) -> None:
    """Store the state after this round of an algorithm that keeps any between rounds (`lasting`).

    A state without tensors is stored, too, as it shows that this round was trained. A site that
    hides a failed training stores ``state_before`` if the state is no longer finite.
    """
    state = algorithm.packed_state()
    is_finite = all(bool(value.isfinite().all()) for value in state.values())
    if not client.reports_failed_training and not is_finite:
        log(
            "ERROR",
            f"run {client.run_id}: the state has NaN or infinity after training; that of before"
            " stays",
        )
        state = dict(state_before)
    if algorithm.lasting:
        client.states.save(client.instructions.round, client.arch, state)


def pack_reply(
    evaluated: EvaluatedModel,
    upload: Payload,
    losses: dict[str, float],
    seconds: dict[str, float],
) -> RecordDict:
    """Return the content of the reply: what may leave of the upload and of the figures.

    The upload is empty in the final evaluation.
    """
    work = evaluated.work
    algorithm = evaluated.algorithm
    settings = work.settings
    # the algorithm has left out what is not due in this round (`Settings.due_up`)
    declared = settings.exchange.up if work.client.trains_now else {}
    permitted = algorithm.protections.upload(upload)
    report = make_report(evaluated, losses, seconds)
    reply = Reply(permitted, declared, algorithm.templates, report)
    reply = algorithm.protections.reply(reply)  # under secure aggregation a masked one
    content = pack_payload(reply.upload, reply.declared)
    content.update(reply.beside)  # records of protections
    reported_losses = settings.row.reported_losses
    content["report"] = records.pack_report(reply.report, reported_losses, work.metrics)
    return content


def make_report(
    evaluated: EvaluatedModel, losses: dict[str, float], seconds: dict[str, float]
) -> records.Report:
    """Return the report of a client's figures, as far as its protections let them leave."""
    work = evaluated.work
    protections = evaluated.algorithm.protections
    test_samples = len(work.data.test_labels)
    validation_samples = len(work.data.validation_labels)
    tested = protections.evaluation(evaluated.tested, test_samples)
    validated = protections.evaluation(evaluated.validated, validation_samples)
    report = records.Report(
        round=work.instructions.round,
        train_samples=work.stated_samples,
        test_samples=test_samples,
        correct=tested.correct,
        metrics=tested.metrics,
        losses=losses,
        seconds=seconds,
        validation_samples=validation_samples,
        validation=validated.accuracies(validation_samples) | validated.metrics,
    )
    return protections.report(report)
