"""The ClientApp: open the client, evaluate, train, protect, reply. One exchange per round carries all of it."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from client_app.algorithms.base import client_half
from client_app.answers import answered, log
from client_app.client import Client
from client_app.data import Samples
from client_app.evaluation import Evaluation, evaluate
from client_app.introduction import introduction
from client_app.protections import names, protections_of
from client_app.protections.secure_sum import STAGES, sum_of
from client_app.trained_model import Evaluated, choose_best, leave_best, leave_model
from client_app.training import TrainingError, for_epochs
from protofl_common.basics.devices import seed_torch
from protofl_common.maths.prototypes import chosen
from protofl_common.runs.folder import WEIGHTS
from protofl_common.wire import records
from protofl_common.wire.payloads import Payload, pack_payload, unpack_payload
from protofl_common.wire.schema import RefusedMessage

app = ClientApp()


@app.train()
@answered
def train_round(message: Message, context: Context) -> RecordDict:
    """A round: evaluate what was received, train, upload."""
    with Visit(message, context) as visit:
        if visit.client.evaluates:
            leave_best(visit.evaluate())
        return visit.reply(*visit.fit())


@app.evaluate()
@answered
def final_evaluation(message: Message, context: Context) -> RecordDict:
    """After the last round: evaluate only, and leave the model."""
    with Visit(message, context) as visit:
        client = visit.client
        if client.is_new:
            visit.train_late()
        evaluated = visit.evaluate()
        with visit.timed("save"):
            leave_model(evaluated, WEIGHTS, client.instructions.round)
            client.states.finish(client.instructions.round)
        return visit.reply(Payload(), {})


QUERIES = {
    "default": introduction,  # before the first round; Flower's name for a query without one
    "best": choose_best,  # after the final evaluation: which round was the best
    **STAGES,  # of secure aggregation
}
for name, work in QUERIES.items():
    app.query(name)(answered(work))


class Visit(AbstractContextManager["Visit"]):
    """One message that is being answered: the client and its algorithm, which has received what the server sent.

    Within its context an error counts as the answer, too: it tells of the samples that caused it.
    RefusedMessage, SettingsError, StateError or LedgerError where the client does not answer.
    """

    def __init__(self, message: Message, context: Context) -> None:
        self.seconds: dict[str, float] = {}
        with self.timed("load"):
            self.client = client = Client(context, message)
            self.protections = protections_of(client)
            for protection in self.protections:
                protection.before()
            number = client.instructions.round
            seed_torch(client.seed_for("visit", number))  # for a package's half
            self.algorithm = client_half(client.settings.row)(client, number)
            self._restore()
            declared = client.settings.exchange.down
            limits = client.limits(self.algorithm.templates(declared))
            self.algorithm.receive(unpack_payload(client.content, declared, limits, required=False))
            self.algorithm.privacy.begin(self.algorithm.all_modules)
            self.secure_sum = sum_of(client)
            if client.evaluates:
                _ = client.test_set, client.validation_set  # read now what is used
            if client.trains_now:
                _ = client.train_set
        for protection in self.protections:
            protection.charge()
        self.evaluated = Evaluated(self.algorithm)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, Exception):
            for protection in self.protections:
                protection.after()

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = time.perf_counter() - start

    def _restore(self) -> None:
        client, algorithm, instructions = self.client, self.algorithm, self.client.instructions
        earlier = instructions.run_history.earlier
        if client.node.is_site and client.trains_now and instructions.round == (earlier[-1][1] if earlier else 0) + 1:
            acting = f"protections: {names(client.settings, is_site=True)}"
            log("INFO", f"run {instructions.run_name} ({client.run_id}) {client.states.beginning}; {acting}")
        if not algorithm.lasting:
            return
        first_without = instructions.round + (not client.trains_now)
        counted = instructions.counted
        if state := client.states.load(first_without, client.arch, client.device, counted):
            algorithm.restore(*state)
            if client.node.is_site and state[1] < counted:
                newest = f"the newest model in state-dir is of round {state[1]}"
                why = f"{newest}, older than round {counted}, the last that counted; it goes on from it"
                log("WARNING", f"run {client.run_id}: {why}")
        elif first_without > 1 and client.node.is_site:
            if client.settings.privacy.secagg and client.states.uncounted(first_without):
                history = f"round.run_history is {instructions.run_history.text!r}"
                why = "this site has models of earlier rounds, and begins with no new one under secure aggregation"
                raise RefusedMessage(f"{history}, by which none counts: {why}")
            log("WARNING", f"run {client.run_id}: no model of an earlier round in state-dir; it begins with a new one")

    def evaluate(self) -> Evaluated:
        client, algorithm, settings = self.client, self.algorithm, self.client.settings
        least, adds_balanced = settings.privacy.min_class_samples, client.data.uneven and not client.node.is_site
        metrics = settings.reported_metrics if adds_balanced else settings.metrics
        how = algorithm.similarity, algorithm.predicts_with_head, metrics, client.num_classes, least

        def figures(data: Samples) -> Evaluation:
            return evaluate(algorithm.evaluation_model(), data, settings.training.eval_batch_size, prototypes, *how)

        with self.timed("evaluate"):
            prototypes = algorithm.prototypes_for_prediction()
            if prototypes is not None and settings.training.predict_among == "own":
                prototypes = chosen(prototypes, client.large_classes.to(client.device))
            validated = figures(client.validation_set) if len(client.validation_set) else Evaluation()
            self.evaluated = Evaluated(algorithm, prototypes, figures(client.test_set), validated)
        return self.evaluated

    def train_late(self) -> None:
        """Train as in a round, for ``new-client-epochs``; nothing of that leaves a new client but its figures."""
        settings = self.client.settings
        if epochs := settings.federation.new_client_epochs:
            self.algorithm.training = for_epochs(settings.training, epochs)
            with self.timed("train"):
                self.algorithm.fit()

    def fit(self) -> tuple[Payload, dict[str, float]]:
        """Train for a round, and store the algorithm's state; what `reply` sends."""
        client, algorithm = self.client, self.algorithm
        before = {} if client.tells_errors else algorithm.packed_state()
        with self.timed("train"):
            losses = algorithm.fit()
        if not isinstance(losses, dict):
            half, returned = type(algorithm).__name__, type(losses).__name__
            raise TrainingError(f"{half}.fit() returned {returned}, not a dictionary with the mean of each loss term")
        with self.timed("prototypes"):
            upload = algorithm.upload()
        algorithm.privacy.check_answer(algorithm.all_modules, upload)
        with self.timed("save"):
            after = algorithm.packed_state()
            whole = client.tells_errors or all(bool(value.isfinite().all()) for value in after.values())
            if not whole:
                log("ERROR", f"run {client.run_id}: the state has NaN or infinity after training; that of before stays")
            if algorithm.lasting:  # an empty state too, as of SGD without momentum: it has a round
                state = after if whole else before
                client.states.save(client.instructions.round, client.arch, state)
        return upload, losses

    def reply(self, upload: Payload, losses: dict[str, float]) -> RecordDict:
        """Pack what may leave of ``upload``, which only training has, and the report."""
        declared = self.client.settings.exchange.up if self.client.trains_now else {}
        for protection in self.protections:
            upload = protection.upload(upload)
        report = self._report(losses)
        if self.secure_sum is None:
            content = pack_payload(upload, declared)
        else:
            limits = self.client.limits(self.algorithm.templates(declared))
            content, report = self.secure_sum.pack(upload, report, limits)
        content["report"] = records.pack_report(report, self.client.settings.row.reported_losses, self.client.metrics)
        return content

    def _report(self, losses: dict[str, float]) -> records.Report:
        tested, validated, data = self.evaluated.tested, self.evaluated.validated, self.client.data
        for protection in self.protections:
            tested = protection.evaluation(tested, len(data.test_labels))
            validated = protection.evaluation(validated, len(data.validation_labels))
        report = records.Report(
            round=self.client.instructions.round,
            train_samples=self.client.stated_samples,
            test_samples=len(data.test_labels),
            correct=tested.correct,
            metrics=tested.metrics,
            losses=losses,
            seconds=self.seconds,
            validation_samples=len(data.validation_labels),
            validation=validated.accuracies(len(data.validation_labels)) | validated.metrics,
        )
        for protection in self.protections:
            report = protection.report(report)
        return report
