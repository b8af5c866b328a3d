"""The ClientApp: open the client, evaluate, train, protect, reply.

One exchange per round carries all of it.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from client_app.algorithms.base import ClientAlgorithm, client_half
from client_app.answers import answered, log
from client_app.client import Client, open_client
from client_app.data import Samples
from client_app.evaluation import Evaluation, evaluate
from client_app.introduction import introduction
from client_app.protections import PROTECTIONS, names, protections_of
from client_app.protections.base import Protection, Query, Reply
from client_app.trained_model import EvaluatedModel, choose_best, leave_best, leave_model
from client_app.training import TrainingError, for_epochs
from protofl_common.basics.devices import seed_torch
from protofl_common.maths.prototypes import Prototypes, chosen
from protofl_common.runs.folder import WEIGHTS
from protofl_common.wire import records
from protofl_common.wire.payloads import Payload, pack_payload, unpack_payload
from protofl_common.wire.schema import RefusedMessage

app = ClientApp()


@app.train()
@answered
def train_round(message: Message, context: Context) -> RecordDict:
    """A round: evaluate what was received, train, upload."""
    visit = open_visit(message, context)
    visit.charge()  # before a sample is used
    with visit.recorded():  # from here on, an error is an answer, too
        if visit.client.evaluates:
            leave_best(visit.evaluate())
        upload, losses = visit.fit()
        return visit.reply(upload, losses)


@app.evaluate()
@answered
def final_evaluation(message: Message, context: Context) -> RecordDict:
    """After the last round: evaluate, and leave the model in this client's folder.

    A new client, which no round has trained, first trains for ``new-client-epochs``.
    """
    visit = open_visit(message, context)
    visit.charge()  # as in `train_round`: before a sample is used
    with visit.recorded():
        if visit.client.is_new:
            visit.train_late()
        evaluated = visit.evaluate()
        visit.leave(evaluated)
        return visit.reply(Payload(), {})


QUERIES: dict[str, Query] = {
    "default": introduction,  # before the first round; Flower's name for a query without one
    "best": choose_best,  # after the final evaluation: which round was the best
}
for protection in PROTECTIONS:
    QUERIES |= protection.queries
for name, work in QUERIES.items():
    app.query(name)(answered(work))


def open_visit(message: Message, context: Context) -> "Visit":
    """Read a message, and all that its answer needs: no sample has been used yet.

    RefusedMessage, SettingsError or StateError where the client does not answer.
    """
    seconds: dict[str, float] = {}
    with timed(seconds, "load"):
        client = open_client(context, message)  # asks its operator
        protections = protections_of(client)
        for protection in protections:
            protection.before()
        algorithm = _new_algorithm(client)
        _restore(algorithm)
        _receive(algorithm)
        for protection in protections:
            protection.receive()
        client.load_data()
    return Visit(client, protections, algorithm, seconds, EvaluatedModel(algorithm))


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Note how many seconds a phase takes; one that fails has none."""
    start = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - start


def _new_algorithm(client: Client) -> ClientAlgorithm[Any]:
    number = client.instructions.round
    seed_torch(client.seed_for("visit", number))  # for a package's half
    return client_half(client.settings.row)(client, number)


def _restore(algorithm: ClientAlgorithm[Any]) -> None:
    """Put the state of the client's last round that counts in place, if the algorithm has any.

    RefusedMessage for a new model under secure aggregation where the client has an earlier one.
    """
    client = algorithm.client
    instructions = client.instructions
    _log_beginning(client)
    if not algorithm.lasting:
        return

    first_without = instructions.round + (0 if client.trains_now else 1)
    state = client.states.load(first_without, client.arch, client.device, instructions.counted)
    if state is not None:
        tensors, last_round = state
        algorithm.restore(tensors, last_round)
        if client.node.is_site and last_round < instructions.counted:
            newest = f"the newest model in state-dir is of round {last_round}"
            older = f"older than round {instructions.counted}, the last that counted"
            log("WARNING", f"run {client.run_id}: {newest}, {older}; it goes on from it")
        return
    if first_without == 1 or not client.node.is_site:
        return
    if client.settings.privacy.secagg and client.states.uncounted(first_without):
        history = f"round.run_history is {instructions.run_history.text!r}"
        has_models = "this site has models of earlier rounds"
        why = f"{has_models}, and begins with no new one under secure aggregation"
        raise RefusedMessage(f"{history}, by which none counts: {why}")
    none = "no model of an earlier round in state-dir"
    log("WARNING", f"run {client.run_id}: {none}; it begins with a new one")


def _log_beginning(client: Client) -> None:
    """Say in a site's log that a Flower run begins, at its first round."""
    if not (client.node.is_site and client.trains_now):
        return
    instructions = client.instructions
    last_round = 0
    if instructions.run_history.earlier:
        _, last_round = instructions.run_history.earlier[-1]
    if instructions.round == last_round + 1:
        protections = names(client.settings, is_site=True)
        begins = f"run {instructions.run_name} ({client.run_id}) {client.states.beginning}"
        log("INFO", f"{begins}; protections: {protections}")


def _receive(algorithm: ClientAlgorithm[Any]) -> None:
    """Give the algorithm what the server sent; all that it has then may leave."""
    client = algorithm.client
    declared = client.settings.exchange.down
    limits = client.limits(algorithm.templates(declared))
    payload = unpack_payload(client.content, declared, limits, required=False)
    algorithm.receive(payload)
    algorithm.privacy.begin(algorithm.all_modules)


@dataclass
class Visit:
    """One message that is being answered, by an algorithm that has received what it brought."""

    client: Client
    protections: list[Protection]
    algorithm: ClientAlgorithm[Any]
    seconds: dict[str, float]  # of each phase
    evaluated: EvaluatedModel  # nothing, until `evaluate`

    def charge(self) -> None:
        """Charge for the answer, before it makes use of a sample.

        SettingsError or LedgerError where that cannot be.
        """
        for protection in self.protections:
            protection.charge()

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Let protections record the answer that the block makes.

        An error is an answer, too: it tells of the samples that caused it. An interruption is none,
        and what fails before the block is none either.
        """
        try:
            yield
        except Exception:
            self._record()
            raise
        self._record()

    def _record(self) -> None:
        for protection in self.protections:
            protection.after()

    def evaluate(self) -> EvaluatedModel:
        """Evaluate the model on test and validation samples, by head and by prototypes."""
        client = self.client
        algorithm = self.algorithm
        with timed(self.seconds, "evaluate"):
            prototypes = algorithm.prototypes_for_prediction()
            if prototypes is not None and client.settings.training.predict_among == "own":
                prototypes = chosen(prototypes, client.large_classes.to(client.device))
            validated = Evaluation()
            if len(client.validation_set):
                validated = self._figures(client.validation_set, prototypes)
            tested = self._figures(client.test_set, prototypes)
            self.evaluated = EvaluatedModel(algorithm, prototypes, tested, validated)
        return self.evaluated

    def _figures(self, data: Samples, prototypes: Prototypes | None) -> Evaluation:
        client = self.client
        algorithm = self.algorithm
        settings = client.settings
        adds_balanced = client.data.has_uneven_classes and not client.node.is_site
        return evaluate(
            algorithm.evaluation_model(),
            data,
            settings.training.eval_batch_size,
            prototypes,
            similarity=algorithm.similarity,
            with_head=algorithm.predicts_with_head,
            metrics=settings.reported_metrics if adds_balanced else settings.metrics,
            num_classes=client.num_classes,
            least=settings.privacy.min_class_samples,
        )

    def train_late(self) -> None:
        """Train as in a round, for ``new-client-epochs``.

        Nothing of that leaves a new client but its figures.
        """
        settings = self.client.settings
        epochs = settings.federation.new_client_epochs
        if epochs:
            self.algorithm.training = for_epochs(settings.training, epochs)
            with timed(self.seconds, "train"):
                self.algorithm.fit()

    def fit(self) -> tuple[Payload, dict[str, float]]:
        """Train for a round, and store the algorithm's state; what `reply` sends."""
        client = self.client
        algorithm = self.algorithm
        before = {} if client.tells_errors else algorithm.packed_state()
        with timed(self.seconds, "train"):
            losses = algorithm.fit()
        if not isinstance(losses, dict):
            half = type(algorithm).__name__
            returned = f"{half}.fit() returned {type(losses).__name__}"
            raise TrainingError(f"{returned}, not a dictionary with the mean of each loss term")
        with timed(self.seconds, "prototypes"):
            upload = algorithm.upload()
        algorithm.privacy.check_answer(algorithm.all_modules, upload)
        with timed(self.seconds, "save"):
            state = algorithm.packed_state()
            if not client.tells_errors and not _is_finite(state):
                broken = "the state has NaN or infinity after training; that of before stays"
                log("ERROR", f"run {client.run_id}: {broken}")
                state = before
            if algorithm.lasting:  # an empty state too, as of SGD without momentum: it has a round
                client.states.save(client.instructions.round, client.arch, state)
        return upload, losses

    def leave(self, evaluated: EvaluatedModel) -> None:
        """Leave the model for use, and only the last round's state."""
        last_round = self.client.instructions.round
        with timed(self.seconds, "save"):
            leave_model(evaluated, WEIGHTS, last_round)
            self.client.states.finish(last_round)

    def reply(self, upload: Payload, losses: dict[str, float]) -> RecordDict:
        """Pack what may leave of ``upload``, which only training has, and the report."""
        settings = self.client.settings
        declared = settings.exchange.up if self.client.trains_now else {}
        for protection in self.protections:
            upload = protection.upload(upload)
        limits = self.client.limits(self.algorithm.templates(declared))
        reply = Reply(upload, declared, limits, self._report(losses))
        for protection in self.protections:
            reply = protection.reply(reply)
        content = pack_payload(reply.upload, reply.declared)
        content.update(reply.beside)
        reported_losses = settings.row.reported_losses
        content["report"] = records.pack_report(reply.report, reported_losses, self.client.metrics)
        return content

    def _report(self, losses: dict[str, float]) -> records.Report:
        client = self.client
        test_samples = len(client.data.test_labels)
        validation_samples = len(client.data.validation_labels)
        tested = self.evaluated.tested
        validated = self.evaluated.validated
        for protection in self.protections:
            tested = protection.evaluation(tested, test_samples)
            validated = protection.evaluation(validated, validation_samples)
        report = records.Report(
            round=client.instructions.round,
            train_samples=client.stated_samples,
            test_samples=test_samples,
            correct=tested.correct,
            metrics=tested.metrics,
            losses=losses,
            seconds=self.seconds,
            validation_samples=validation_samples,
            validation=validated.accuracies(validation_samples) | validated.metrics,
        )
        for protection in self.protections:
            report = protection.report(report)
        return report


def _is_finite(state: dict[str, Tensor]) -> bool:
    return all(bool(value.isfinite().all()) for value in state.values())
