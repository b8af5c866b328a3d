"""The ClientApp: unpack -> algorithm -> pack. One exchange per round carries evaluation and training.

Every handler returns a Message, whatever happens: a failure becomes an error reply with its reason, for which the
server does not wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from flwr.app import Context, Error, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp

from client_app.account import charge
from client_app.algorithms import client_half
from client_app.algorithms.base import ClientAlgorithm
from client_app.context import CommonSettings
from client_app.data import Samples
from client_app.eager import without_compiler
from client_app.evaluation import Evaluation, Evaluations, evaluate
from client_app.failures import called, log, reason_of
from client_app.handover import forget_all_but, hand_over, settle
from client_app.insight import insight_of
from client_app.outgoing import outgoing, told_metrics
from client_app.secagg import SecureUpload
from client_app.site import Site
from client_app.state import ClientState, StateFolder
from protofl_common.catalog import CATALOG
from protofl_common.config.architectures import ARCHITECTURES
from protofl_common.datasets.store import digest
from protofl_common.prototypes import Prototypes, chosen
from protofl_common.settings import is_site
from protofl_common.text import printable
from protofl_common.wire.limits import RefusedMessage
from protofl_common.wire.payloads import Payload, pack_payload, payload_bytes, unpack_payload
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
from protofl_common.wire.secagg import pack_by_site

app = ClientApp()

_KNOWN_MODELS: dict[str, tuple[int, str]] = {}
"""Of each kind of model that clients of this process have introduced, what `_about_model` says."""
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


def _without_training(stage: str, message: Message, context: Context) -> Message:
    """The other stages of secure aggregation in a round (`secagg.py`)."""
    return _answer(message, context, lambda: _stage(stage, message, context))


for name in ("advertise", "share", "unmask"):
    app.query(name)(partial(_without_training, name))


@app.evaluate()
def final_evaluation(message: Message, context: Context) -> Message:
    """After the last round: evaluate only, and tell what the report may show; then hear which round was the best."""
    return _answer(message, context, lambda: _final_evaluation(message, context))


def _introduction(message: Message, context: Context) -> RecordDict:
    site = Site(context, unpack_baseline(message.content))
    site.check_state_folder()
    about = _about_model(site)
    site.check_batches()
    return RecordDict({"site": pack_site_card(site.card(*about))})


def _about_model(site: Site) -> tuple[int, str]:
    """How many parameters the site's model has, and a digest of all weights that it exchanges ("" for none).

    A model of the catalog is built once for all simulated clients of this process that have the like.
    """
    settings, private = site.settings, site.plan is not None
    of_model = settings.model, site.arch, site.input_shape, site.num_classes
    kind = repr((settings.run.algo, settings.hparams, *of_model, private))
    if kind in _KNOWN_MODELS:
        return _KNOWN_MODELS[kind]
    site.check_model()
    algorithm, exchange = client_half(settings.row)(site, 0), settings.exchange
    if private:
        algorithm.step()  # refuses what DP-SGD cannot train
    weights = {**algorithm.templates(exchange.down), **algorithm.templates(exchange.up)}
    found = sum(parameter.numel() for parameter in site.model.parameters()), digest(weights) if weights else ""
    if settings.run.algo in CATALOG and site.arch in ARCHITECTURES:
        _KNOWN_MODELS[kind] = found
    return found


def _train_round(message: Message, context: Context) -> RecordDict:
    clock = Stopwatch()
    with clock("load"):
        site, instructions, algorithm, states = _open(message, context)
        secure = SecureUpload(site, instructions) if site.settings.sends_sums else None
        if secure:
            secure.peers(message.content)
        site.load_data()
    evaluations = Evaluation(), Evaluation()
    if instructions.evaluate:
        with clock("evaluate"):
            prototypes = _predicting(site, algorithm)
            evaluations = _evaluate(site, algorithm, prototypes)
            if site.settings.run.keep_best:
                best, _ = unpack_best(message.content)
                forget_all_but(site, states, best)
                hand_over(site, algorithm, states, prototypes, evaluations, instructions, instructions.round - 1)
    charge(site, instructions)
    with clock("train"):
        losses = algorithm.fit()
    with clock("prototypes"):
        upload = outgoing(algorithm.upload(), site, instructions.round)
    with clock("save"):
        if tensors := algorithm.packed_state():
            states.save(ClientState(instructions.round, site.arch, tensors))
    report = _report(site, instructions, evaluations, losses, clock)
    declared = site.settings.exchange.up
    if secure:
        content = secure.mask(upload, site.limits(algorithm.templates(declared)))
    else:
        content = pack_payload(upload, declared)
    content["report"] = pack_report(report, site.settings.row.reported_losses, site.metrics)
    return content


def _stage(stage: str, message: Message, context: Context) -> RecordDict:
    site = Site(context, unpack_baseline(message.content))
    if not site.settings.sends_sums:
        raise RefusedMessage("a stage of secure aggregation, which the run's settings do not ask for")
    upload = SecureUpload(site, unpack_instructions(message.content))
    return RecordDict({**pack_by_site(getattr(upload, stage)(message.content))})


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
        SecureUpload(site, instructions).forget()
    upload = outgoing(Payload(insight=statistics), site, instructions.round)
    content = pack_payload(upload, statistics_declared(site.insight))
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
    elif algorithm.kept and first_without > 1 and is_site(context.node_config):
        log("WARNING", f"run {context.run_id}: no model of an earlier round in state-dir; it begins with a new one")
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
    (tested, validated), data = evaluations, site.data
    return Report(
        round=instructions.round,
        train_samples=site.told_samples,
        test_samples=len(data.test_labels),
        correct=tested.correct,
        metrics=told_metrics(tested.metrics, data.test_labels, site),
        losses=losses if site.settings.privacy.dp == "none" else {},
        seconds=clock.seconds,
        validation_samples=len(data.validation_labels),
        validation=validated.accuracies(len(data.validation_labels))
        | told_metrics(validated.metrics, data.validation_labels, site),
    )


def _answer(message: Message, context: Context, work: Callable[[], RecordDict]) -> Message:
    """The reply with what ``work`` returns, or an error reply with the reason it did not."""
    try:
        content = work()
        if is_site(context.node_config):
            log("INFO", _told(message, context, content))
        else:
            context.run_config = CommonSettings(context.run_config)
        return Message(content, reply_to=message)
    except Exception as error:
        reason = reason_of(error, is_site(context.node_config))
        if message.metadata.message_type == MessageType.QUERY:  # the server does not know yet who this is
            reason = called(context.node_config) + reason
        return Message(Error(ERROR_CODE, reason), reply_to=message)


def _told(message: Message, context: Context, content: RecordDict) -> str:
    """What has left a site, for its own log."""
    meta, said = message.metadata, message.content.config_records.get("baseline", context.run_config)
    asked = f"run {context.run_id}, {said['algo']!s}, {meta.message_type} {meta.group_id}"
    card = content.config_records.get("site")
    classes = f"; its classes: {', '.join(map(str, card['classes']))}" if card else ""  # type: ignore[arg-type]
    return printable(f"{asked}: sent {', '.join(content)}, {payload_bytes(content):,} bytes of arrays{classes}")


class Stopwatch:
    """Seconds per phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = time.perf_counter() - start
