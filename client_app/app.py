"""The ClientApp: open the client, evaluate, train, protect, reply. One exchange per round carries all of it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import torch
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp

from client_app.algorithms.base import client_half
from client_app.answers import answered, log
from client_app.client import Client
from client_app.data import Samples
from client_app.evaluation import Evaluation, evaluate
from client_app.introduction import introduction
from client_app.protections import protections_of
from client_app.protections.secure_sum import STAGES, channel_of
from client_app.statistics import statistics_of
from client_app.trained_model import choose_best, leave_model
from protofl_common.maths.prototypes import Prototypes, chosen
from protofl_common.wire import records
from protofl_common.wire.payloads import Payload, unpack_payload
from protofl_common.wire.schema import Declared

app = ClientApp()


@app.query()
@answered
def introduce(message: Message, context: Context) -> RecordDict:
    """Before the first round: who this client is. Prepares the data, so that what is wrong with them shows now."""
    return RecordDict({"site": records.pack_site_card(introduction(message, context))})


@app.train()
@answered
def train_round(message: Message, context: Context) -> RecordDict:
    """A round: evaluate what was received, train, upload."""
    with Visit(message, context) as visit:
        if visit.instructions.evaluate:
            visit.evaluate()
        return visit.reply(*visit.fit())


@app.evaluate()
@answered
def final_evaluation(message: Message, context: Context) -> RecordDict:
    """After the last round: evaluate only, and send what the report may show; then hear which round was the best."""
    best, chosen_on = records.unpack_best(message.content)
    if chosen_on:
        client = Client(context, records.unpack_baseline(message.content))
        choose_best(client.states(records.unpack_instructions(message.content)), best, chosen_on)
        return RecordDict()
    with Visit(message, context) as visit:
        visit.evaluate()
        return visit.reply(*visit.finish())


for name, stage in STAGES.items():
    app.query(name)(answered(stage))


class Visit:
    """One message: the client and its algorithm as before this round, with what the server sent taken in.

    Within its context an error counts as the answer, too: it tells of the samples that caused it.
    RefusedMessage, SettingsError, StateError or LedgerError where the client does not answer.
    """

    def __init__(self, message: Message, context: Context) -> None:
        self.message, self.training = message, message.metadata.message_type == MessageType.TRAIN
        self.seconds: dict[str, float] = {}
        with self.timed("load"):
            self.client = client = Client(context, records.unpack_baseline(message.content))
            self.instructions = records.unpack_instructions(message.content)
            self.states = client.states(self.instructions)
            self.algorithm = client_half(client.settings.row)(client, self.instructions.round)
            self.protections = protections_of(client)
            self._restore()
            declared = client.settings.exchange.down
            limits = client.limits(self.algorithm.templates(declared))
            self.algorithm.receive(unpack_payload(message.content, declared, limits, required=False))
            self.channel = channel_of(client, self.instructions, message)
            _ = client.test_set, client.validation_set, self.training and client.train_set  # read now
        for protection in self.protections:
            protection.before(self.instructions, self.training)
        self.evaluations = Evaluation(), Evaluation()
        self.prototypes: Prototypes | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, Exception):
            for protection in self.protections:
                protection.after(self.instructions, self.training)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = time.perf_counter() - start

    def _restore(self) -> None:
        client, algorithm, instructions = self.client, self.algorithm, self.instructions
        earlier = instructions.run_history.earlier
        if client.node.is_site and self.training and instructions.round == (earlier[-1][1] if earlier else 0) + 1:
            acting = ", ".join(protection.name for protection in self.protections)
            run = f"run {instructions.run_name} ({client.run_id})"
            log("INFO", f"{run} {self.states.beginning}; protections: {acting}")
        if not algorithm.lasting:
            return
        first_without = instructions.round + (not self.training)
        if state := self.states.load(first_without, client.arch, client.device):
            algorithm.restore(*state)
        elif first_without > 1 and client.node.is_site:
            log("WARNING", f"run {client.run_id}: no model of an earlier round in state-dir; it begins with a new one")

    def evaluate(self) -> None:
        client = self.client
        with self.timed("evaluate"):
            self.prototypes = self.algorithm.prototypes_for_prediction()
            if self.prototypes is not None and client.settings.training.predict_among == "own":
                self.prototypes = chosen(self.prototypes, torch.from_numpy(client.large_classes).to(client.device))
            validated = self._evaluated(client.validation_set) if len(client.validation_set) else Evaluation()
            self.evaluations = self._evaluated(client.test_set), validated
            if self.training:
                best, _ = records.unpack_best(self.message.content)
                leave_model(client, self.algorithm, self.instructions, self.prototypes, self.evaluations, best)

    def _evaluated(self, data: Samples) -> Evaluation:
        algorithm, settings = self.algorithm, self.client.settings
        return evaluate(
            algorithm.evaluation_model(),
            data,
            settings.training.eval_batch_size,
            self.prototypes,
            similarity=algorithm.similarity,
            with_head=algorithm.predicts_with_head,
            metrics=settings.metrics,
            num_classes=self.client.num_classes,
        )

    def fit(self) -> tuple[Payload, dict[str, float], Declared]:
        """Train for a round, and store the algorithm's state; what `reply` sends."""
        with self.timed("train"):
            losses = self.algorithm.fit_covered()
        with self.timed("prototypes"):
            upload = self.algorithm.upload()
        with self.timed("save"):
            if tensors := self.algorithm.packed_state():
                self.states.save(self.instructions.round, self.client.arch, tensors)
        return upload, losses, self.client.settings.exchange.up

    def finish(self) -> tuple[Payload, dict[str, float], Declared]:
        """Leave the evaluated model for ``protofl export``, and end the run; what `reply` sends."""
        statistics, declared = statistics_of(self.client, self.algorithm)
        with self.timed("save"):
            leave_model(self.client, self.algorithm, self.instructions, self.prototypes, self.evaluations)
            self.states.finish(self.instructions.round)
        return Payload(statistics=statistics), {}, declared

    def reply(self, upload: Payload, losses: dict[str, float], declared: Declared) -> RecordDict:
        """Pack what may leave of ``upload``, ``declared`` for this message, and the report."""
        for protection in self.protections:
            upload = protection.upload(upload, self.instructions.round)
        upload, report = upload.without_undeclared_counts(declared), self._report(losses)
        content, report = self.channel.pack(upload, report, declared, self.algorithm.templates)
        content["report"] = records.pack_report(report, self.client.settings.row.reported_losses, self.client.metrics)
        return content

    def _report(self, losses: dict[str, float]) -> records.Report:
        (tested, validated), data = self.evaluations, self.client.data
        for protection in self.protections:
            tested = protection.evaluation(tested, data.test_labels)
            validated = protection.evaluation(validated, data.validation_labels)
        report = records.Report(
            round=self.instructions.round,
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
