"""A message to a client in a run: a round's, or the final evaluation's. It is opened, worked on and answered here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from flwr.app import Context, Message, MessageType, RecordDict

from client_app.algorithms import client_half
from client_app.client import Client
from client_app.data import Samples
from client_app.evaluation import Evaluation, Evaluations, evaluate
from client_app.failures import log
from client_app.protections import protections_of
from client_app.protections.secure_sum import SecureSum
from client_app.state import ClientState
from client_app.trained_model import forget_all_but, leave_model
from protofl_common.maths.prototypes import Prototypes, chosen
from protofl_common.wire.payloads import Payload, pack_payload, unpack_payload
from protofl_common.wire.records import (
    Report,
    pack_report,
    unpack_baseline,
    unpack_best,
    unpack_instructions,
)
from protofl_common.wire.schema import Declared


class Visit:
    """The client and its algorithm as they were before this round, with what the server sent taken in.

    RefusedMessage, SettingsError, StateError or LedgerError where the client does not answer.
    """

    def __init__(self, message: Message, context: Context) -> None:
        self.message, self.training = message, message.metadata.message_type == MessageType.TRAIN
        self.clock = Stopwatch()
        with self.clock("load"):
            self.client = Client(context, unpack_baseline(message.content))
            self.instructions = unpack_instructions(message.content)
            self.states = self.client.folders.states(self.instructions)
            self.algorithm = client_half(self.client.settings.row)(self.client, self.instructions.round)
            self.protections = protections_of(self.client)
            self._restore()
            self._receive()
            self.sum = SecureSum.of(self.client, self.instructions, not self.training)
            if self.sum:
                self.sum.peers(message.content)
            _ = self.client.test_set, self.client.validation_set, self.training and self.client.train_set  # read now
        for protection in self.protections:
            protection.before(self.instructions, self.training)
        self.evaluations: Evaluations = Evaluation(), Evaluation()
        self.prototypes: Prototypes | None = None

    def evaluate(self) -> None:
        """Evaluate the model on the test and the validation samples."""
        with self.clock("evaluate"):
            self.prototypes = self._predicting()
            validated = self.client.validation_set
            self.evaluations = (
                self._evaluated(self.client.test_set),
                self._evaluated(validated) if len(validated) else Evaluation(),
            )
            if self.training and self.client.settings.run.keep_best:
                best, _ = unpack_best(self.message.content)
                forget_all_but(self.client, self.states, best)
                self.leave_model(self.instructions.round - 1)

    def train(self) -> tuple[Payload, dict[str, float]]:
        """Train, and store the algorithm's state; the upload, and the mean of each loss term."""
        with self.clock("train"):
            losses = self.algorithm.fit_covered()
        with self.clock("prototypes"):
            upload = self.algorithm.upload()
        with self.clock("save"):
            if tensors := self.algorithm.packed_state():
                self.states.save(ClientState(self.instructions.round, self.client.arch, tensors))
        return upload, losses

    def leave_model(self, after: int | None = None) -> None:
        """Leave the evaluated model for ``protofl export``."""
        of_model = self.client, self.algorithm, self.states, self.prototypes, self.evaluations
        leave_model(*of_model, self.instructions, after)

    def reply(self, upload: Payload, losses: dict[str, float], declared: Declared) -> RecordDict:
        """Pack what may leave of ``upload``, ``declared`` for this message, and the report."""
        for protection in self.protections:
            upload = protection.upload(upload, self.instructions.round)
        upload, report = upload.without_undeclared_counts(declared), self._report(losses)
        limits = self.client.limits(self.algorithm.templates(declared))
        if self.sum:
            content, report = self.sum.mask(upload, report, limits)
        else:
            content = pack_payload(upload, declared)
        content["report"] = pack_report(report, self.client.settings.row.reported_losses, self.client.metrics)
        return content

    @contextmanager
    def answered(self) -> Iterator[None]:
        """Around the work on the answer: an error is one too, for it tells of the samples that caused it."""
        try:
            yield
        except Exception:
            self._record()
            raise
        self._record()

    def _record(self) -> None:
        for protection in self.protections:
            protection.after(self.instructions, self.training)

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
            algorithm.restore(state.tensors, state.round)
        elif first_without > 1 and client.node.is_site:
            log("WARNING", f"run {client.run_id}: no model of an earlier round in state-dir; it begins with a new one")

    def _receive(self) -> None:
        declared = self.client.settings.exchange.down
        limits = self.client.limits(self.algorithm.templates(declared))
        self.algorithm.receive(unpack_payload(self.message.content, declared, limits, required=False))

    def _predicting(self) -> Prototypes | None:
        """All prototypes, or with ``predict-among = "own"`` those of this client's large classes."""
        prototypes = self.algorithm.prototypes_for_prediction()
        if prototypes is None or self.client.settings.training.predict_among == "all":
            return prototypes
        return chosen(prototypes, torch.from_numpy(self.client.large_classes).to(self.client.device))

    def _evaluated(self, data: Samples) -> Evaluation:
        return evaluate(
            self.algorithm.evaluation_model(),
            data,
            self.client.settings.training.eval_batch_size,
            self.prototypes,
            similarity=self.algorithm.similarity,
            with_head=self.algorithm.predicts_with_head,
            metrics=self.client.settings.metrics,
            num_classes=self.client.num_classes,
        )

    def _report(self, losses: dict[str, float]) -> Report:
        (tested, validated), data = self.evaluations, self.client.data
        for protection in self.protections:
            tested = protection.evaluation(tested, data.test_labels)
            validated = protection.evaluation(validated, data.validation_labels)
        report = Report(
            round=self.instructions.round,
            train_samples=self.client.stated_samples,
            test_samples=len(data.test_labels),
            correct=tested.correct,
            metrics=tested.metrics,
            losses=losses,
            seconds=self.clock.seconds,
            validation_samples=len(data.validation_labels),
            validation=validated.accuracies(len(data.validation_labels)) | validated.metrics,
        )
        for protection in self.protections:
            report = protection.report(report)
        return report


class Stopwatch:
    """Seconds per phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = time.perf_counter() - start
