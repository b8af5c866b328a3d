"""The ClientApp: unpack -> algorithm -> pack. One exchange per round carries evaluation and training.

Every handler returns a Message, whatever happens: a failure becomes an error reply with its reason, for which the
server does not wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flwr.app import Context, Error, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp

from client_app.algorithms import client_half
from client_app.algorithms.base import ClientAlgorithm
from client_app.data import Samples
from client_app.eager import without_compiler
from client_app.evaluation import Evaluation, Evaluations, evaluate
from client_app.failures import reason_of
from client_app.handover import hand_over, keep_evaluated, settle
from client_app.insight import insight_of
from client_app.site import Site
from client_app.state import ClientState, StateFolder
from protofl_common.prototypes import Prototypes, chosen
from protofl_common.settings import is_site
from protofl_common.wire.payloads import Payload, pack_payload, unpack_payload
from protofl_common.wire.records import (
    Instructions,
    Report,
    pack_report,
    pack_site_card,
    unpack_baseline,
    unpack_best,
    unpack_instructions,
)
from protofl_common.wire.schema import statistics_declared

app = ClientApp()

ERROR_CODE = 2
"""Flower's code for "the ClientApp raised an exception"."""


@app.query()
def introduce(message: Message, context: Context) -> Message:
    """Before the first round: who this site is. Prepares the data, so that what is wrong with them shows now."""
    return _answer(message, context, lambda: _introduction(message, context))


@app.train()
def train_round(message: Message, context: Context) -> Message:
    """A round: evaluate what was received, train, upload."""
    without_compiler()
    return _answer(message, context, lambda: _train_round(message, context))


@app.evaluate()
def final_evaluation(message: Message, context: Context) -> Message:
    """After the last round: evaluate only, and tell what the report may show; then hear which round was the best."""
    return _answer(message, context, lambda: _final_evaluation(message, context))


def _introduction(message: Message, context: Context) -> RecordDict:
    site = Site(context, unpack_baseline(message.content))
    exchange = site.settings.exchange
    algorithm = client_half(site.settings.row)(site, 0)
    weights = {**algorithm.templates(exchange.down), **algorithm.templates(exchange.up)}
    return RecordDict({"site": pack_site_card(site.card(weights))})


def _train_round(message: Message, context: Context) -> RecordDict:
    clock = Stopwatch()
    with clock("load"):
        site, instructions, algorithm, states = _open(message, context)
        site.load_data()
    evaluations = Evaluation(), Evaluation()
    if instructions.evaluate:
        with clock("evaluate"):
            prototypes = _predicting(site, algorithm)
            evaluations = _evaluate(site, algorithm, prototypes)
            if site.settings.run.keep_best:
                best, _ = unpack_best(message.content)
                keep_evaluated(site, algorithm, states, prototypes, evaluations, instructions, best)
    with clock("train"):
        losses = algorithm.fit()
    with clock("prototypes"):
        upload = algorithm.upload()
    with clock("save"):
        if tensors := algorithm.packed_state():
            states.save(ClientState(instructions.round, site.arch, tensors))
    report = _report(site, instructions, evaluations, losses, clock)
    content = pack_payload(upload, site.settings.exchange.up)
    content["report"] = pack_report(report, site.settings.row.reported_losses, site.metrics)
    return content


def _final_evaluation(message: Message, context: Context) -> RecordDict:
    best, chosen_on = unpack_best(message.content)
    if chosen_on:
        site = Site(context, unpack_baseline(message.content))
        settle(site.states(unpack_instructions(message.content)), best, chosen_on)
        return RecordDict()
    clock = Stopwatch()
    with clock("load"):
        site, instructions, algorithm, states = _open(message, context)
        _ = site.test_set, site.validation_set
    with clock("evaluate"):
        prototypes = _predicting(site, algorithm)
        evaluations = _evaluate(site, algorithm, prototypes)
    statistics = None if site.insight == "none" else insight_of(site, algorithm)
    with clock("save"):
        hand_over(site, algorithm, states, prototypes, evaluations, instructions)
        states.finish(instructions.round)
    content = pack_payload(Payload(insight=statistics), statistics_declared(site.insight))
    content["report"] = pack_report(_report(site, instructions, evaluations, {}, clock), (), site.metrics)
    return content


def _open(message: Message, context: Context) -> tuple[Site, Instructions, ClientAlgorithm[Any], StateFolder]:
    """The algorithm as it was before this round, or after the last one, with what the server sent taken in."""
    site = Site(context, unpack_baseline(message.content))
    instructions = unpack_instructions(message.content)
    algorithm = client_half(site.settings.row)(site, instructions.round)
    training = message.metadata.message_type == MessageType.TRAIN
    states = site.states(instructions)
    first_without = instructions.round if training else instructions.round + 1
    state = states.load(first_without, site.arch, site.device) if algorithm.kept else None
    if state is not None:
        algorithm.restore(state.tensors, state.round)
    down = site.settings.exchange.down
    limits = site.limits(algorithm.templates(down))
    algorithm.receive(unpack_payload(message.content, down, limits, required=False))
    return site, instructions, algorithm, states


def _predicting(site: Site, algorithm: ClientAlgorithm[Any]) -> Prototypes | None:
    """The prototypes to predict with: all, or with ``predict-among = "own"`` those of this site's classes."""
    prototypes = algorithm.prototypes_for_prediction()
    if prototypes is None or site.settings.training.predict_among == "all":
        return prototypes
    return chosen(prototypes, site.train_set.labels.unique())


def _evaluate(site: Site, algorithm: ClientAlgorithm[Any], prototypes: Prototypes | None) -> Evaluations:
    def on(data: Samples) -> Evaluation:
        return evaluate(
            algorithm.evaluation_model(),
            data,
            site.settings.training.eval_batch_size,
            prototypes,
            similarity=algorithm.similarity,
            with_head=algorithm.predicts_with_head,
            metrics=site.settings.metrics,
            num_classes=site.num_classes,
        )

    return on(site.test_set), on(site.validation_set) if len(site.validation_set) else Evaluation()


def _report(
    site: Site, instructions: Instructions, evaluations: Evaluations, losses: dict[str, float], clock: Stopwatch
) -> Report:
    tested, validated = evaluations
    return Report(
        round=instructions.round,
        train_samples=len(site.data.train_labels),
        test_samples=len(site.data.test_labels),
        correct=tested.correct,
        metrics=tested.metrics,
        losses=losses,
        seconds=clock.seconds,
        validation_samples=len(site.data.validation_labels),
        validation=validated.accuracies(len(site.data.validation_labels)) | validated.metrics,
    )


def _answer(message: Message, context: Context, work: Callable[[], RecordDict]) -> Message:
    """The reply with what ``work`` returns, or an error reply with the reason it did not."""
    try:
        return Message(work(), reply_to=message)
    except Exception as error:
        reason = reason_of(error, is_site(context.node_config))
        return Message(Error(ERROR_CODE, reason), reply_to=message)


class Stopwatch:
    """Seconds per phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = time.perf_counter() - start
