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

import torch
from flwr.app import ConfigRecord, Context, Error, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp

from client_app.account import charge, check_affordable
from client_app.algorithms import client_half
from client_app.algorithms.base import ClientAlgorithm
from client_app.answers import check_unanswered, note_answer
from client_app.context import CommonSettings
from client_app.data import Samples
from client_app.disclosure import disclosed, protected
from client_app.eager import without_compiler
from client_app.evaluation import Evaluation, Evaluations, evaluate
from client_app.failures import called, log, reason_of
from client_app.handover import forget_all_but, hand_over, keep_only
from client_app.secagg import SecureUpload
from client_app.site import Site
from client_app.state import ClientState, StateFolder
from client_app.statistics import statistics_of
from protofl_common.basics.files import digest
from protofl_common.basics.text import printable
from protofl_common.config.architectures import ARCHITECTURES
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.settings import digest_of, is_site
from protofl_common.maths.prototypes import Prototypes, chosen
from protofl_common.privacy.figures import without_figures
from protofl_common.wire.limits import Limits, RefusedMessage
from protofl_common.wire.payloads import Payload, pack_payload, payload_bytes, unpack_payload
from protofl_common.wire.records import (
    Instructions,
    Report,
    check_settings,
    pack_report,
    pack_site_card,
    unpack_baseline,
    unpack_best,
    unpack_instructions,
)
from protofl_common.wire.schema import Declared, statistics_declared
from protofl_common.wire.secagg import FINAL, pack_by_site

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


def _without_training(stage: str, final: bool, message: Message, context: Context) -> Message:
    """The other stages of secure aggregation (`secagg.py`) in a round, or in the final evaluation."""
    return _answer(message, context, lambda: _stage(stage, final, message, context))


for name in ("advertise", "share", "unmask"):
    app.query(name)(partial(_without_training, name, False))
    app.query(name + FINAL)(partial(_without_training, name, True))


@app.evaluate()
def final_evaluation(message: Message, context: Context) -> Message:
    """After the last round: evaluate only, and tell what the report may show; then hear which round was the best."""
    return _answer(message, context, lambda: _final_evaluation(message, context))


def _introduction(message: Message, context: Context) -> RecordDict:
    site = Site(context, unpack_baseline(message.content))
    check_settings(message.content, site.settings.digest)
    if site.has_own_data:
        ignored = ", ".join(["seed", *site.ignored])
        log("INFO", f"run {context.run_id}: this site divides its own data; the run's {ignored} do not act on that")
    site.check_state_folder()
    about = _about_model(site)
    site.check_batches()
    check_affordable(site)
    return RecordDict({"site": pack_site_card(site.card(*about))})


def _about_model(site: Site) -> tuple[int, str]:
    """How many parameters the site's model has, and a digest of all weights that it exchanges ("" for none).

    A model of the catalog is built once for all simulated clients of this process that have the like.
    """
    settings, private = site.settings, site.step_plan is not None
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
        secure = _secure(site, instructions, message)
        _ = site.train_set, site.test_set, site.validation_set  # read now
    charge(site, instructions, trains=True)
    evaluations = Evaluation(), Evaluation()
    if instructions.evaluate:
        with clock("evaluate"):
            prototypes = _predicting(site, algorithm)
            evaluations = _evaluate(site, algorithm, prototypes)
            if site.settings.run.keep_best:
                best, _ = unpack_best(message.content)
                forget_all_but(site, states, best)
                hand_over(site, algorithm, states, prototypes, evaluations, instructions, instructions.round - 1)
    with clock("train"):
        losses = algorithm.fit_covered()
    with clock("prototypes"):
        upload = protected(algorithm.upload(), site, instructions.round)
    with clock("save"):
        if tensors := algorithm.packed_state():
            states.save(ClientState(instructions.round, site.arch, tensors))
    report, declared = _report(site, instructions, evaluations, losses, clock), site.settings.exchange.up
    limits = site.limits(algorithm.templates(declared))
    content = _reply(site, secure, upload, report, declared, limits)
    note_answer(site, instructions, training=True)
    return content


def _secure(site: Site, instructions: Instructions, message: Message) -> SecureUpload | None:
    """The site's part in a sum, after the peers' shares have come; None without secure aggregation."""
    if not site.settings.privacy.secagg:
        return None
    secure = SecureUpload(site, instructions, message.metadata.message_type == MessageType.EVALUATE)
    secure.peers(message.content)
    return secure


def _reply(
    site: Site, secure: SecureUpload | None, upload: Payload, report: Report, declared: Declared, limits: Limits
) -> RecordDict:
    """Upload and report; with secure aggregation both under masks, but for the round and its seconds."""
    if secure:
        content, report = secure.mask(upload, report, limits), without_figures(report)
    else:
        content = pack_payload(upload, declared)
    content["report"] = pack_report(report, site.settings.row.reported_losses, site.metrics)
    return content


def _stage(stage: str, final: bool, message: Message, context: Context) -> RecordDict:
    site = Site(context, unpack_baseline(message.content))
    if not site.settings.privacy.secagg:
        raise RefusedMessage("a stage of secure aggregation, which the run's settings do not ask for")
    upload = SecureUpload(site, unpack_instructions(message.content), final)
    return RecordDict({**pack_by_site(getattr(upload, stage)(message.content))})


def _final_evaluation(message: Message, context: Context) -> RecordDict:
    best, chosen_on = unpack_best(message.content)
    if chosen_on:
        site = Site(context, unpack_baseline(message.content))
        keep_only(site.states(unpack_instructions(message.content)), best, chosen_on)
        return RecordDict()
    clock = Stopwatch()
    with clock("load"):
        site, instructions, algorithm, states = _open(message, context)
        secure = _secure(site, instructions, message)
        _ = site.test_set, site.validation_set
    charge(site, instructions, trains=False)
    with clock("evaluate"):
        prototypes = _predicting(site, algorithm)
        evaluations = _evaluate(site, algorithm, prototypes)
    statistics = None if site.statistics == "none" else statistics_of(site, algorithm)
    with clock("save"):
        hand_over(site, algorithm, states, prototypes, evaluations, instructions)
        states.finish(instructions.round)
    upload = protected(Payload(statistics=statistics), site, instructions.round)
    report, declared = _report(site, instructions, evaluations, {}, clock), statistics_declared(site.statistics)
    content = _reply(site, secure, upload, report, declared, site.limits({}))
    note_answer(site, instructions, training=False)
    return content


def _open(message: Message, context: Context) -> tuple[Site, Instructions, ClientAlgorithm[Any], StateFolder]:
    """The algorithm as it was before this round, or after the last one, with what the server sent taken in."""
    site = Site(context, unpack_baseline(message.content))
    instructions = unpack_instructions(message.content)
    algorithm = client_half(site.settings.row)(site, instructions.round)
    training = message.metadata.message_type == MessageType.TRAIN
    states = site.states(instructions)
    check_unanswered(site, instructions, training)
    earlier = instructions.run_history.earlier
    if site.real and training and instructions.round == (earlier[-1][1] if earlier else 0) + 1:
        log("INFO", f"run {instructions.run_name} ({site.run_id}) {states.beginning}")
    first_without = instructions.round if training else instructions.round + 1
    state = states.load(first_without, site.arch, site.device) if algorithm.lasting else None
    if state is not None:
        algorithm.restore(state.tensors, state.round)
    elif algorithm.lasting and first_without > 1 and is_site(context.node_config):
        log("WARNING", f"run {context.run_id}: no model of an earlier round in state-dir; it begins with a new one")
    down = site.settings.exchange.down
    limits = site.limits(algorithm.templates(down))
    algorithm.receive(unpack_payload(message.content, down, limits, required=False))
    return site, instructions, algorithm, states


def _predicting(site: Site, algorithm: ClientAlgorithm[Any]) -> Prototypes | None:
    """The prototypes to predict with: all, or with ``predict-among = "own"`` those of this site's large classes."""
    prototypes = algorithm.prototypes_for_prediction()
    if prototypes is None or site.settings.training.predict_among == "all":
        return prototypes
    return chosen(prototypes, torch.from_numpy(site.large_classes).to(site.device))


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
    data = site.data
    tested = disclosed(evaluations[0], data.test_labels, site)
    validated = disclosed(evaluations[1], data.validation_labels, site)
    return Report(
        round=instructions.round,
        train_samples=site.stated_samples,
        test_samples=len(data.test_labels),
        correct=tested.correct,
        metrics=tested.metrics,
        losses={} if site.plan or site.settings.privacy.min_class_samples > 1 else losses,  # of one class, if asked so
        seconds=clock.seconds if site.plan is None else {},  # a model can be made slow for inputs of one kind
        validation_samples=len(data.validation_labels),
        validation=validated.accuracies(len(data.validation_labels)) | validated.metrics,
    )


def _answer(message: Message, context: Context, work: Callable[[], RecordDict]) -> Message:
    """The reply with what ``work`` returns, or an error reply with the reason it did not."""
    try:
        content = work()
        if is_site(context.node_config):
            log("INFO", _in_one_line(_asked(message, context), content))
        else:
            context.run_config = CommonSettings(context.run_config)
        return Message(content, reply_to=message)
    except Exception as error:
        at_site = is_site(context.node_config)
        asked = _asked(message, context) if at_site else ""
        reason = reason_of(error, at_site, asked, context.run_config.get("dp") != "none")
        if message.metadata.message_type == MessageType.QUERY:  # the server does not know yet who this is
            reason = called(context.node_config) + reason
        return Message(Error(ERROR_CODE, reason), reply_to=message)


def _asked(message: Message, context: Context) -> str:
    """The question to a site, for its own log: of which run, with which settings."""
    meta, records, run = message.metadata, message.content.config_records, str(context.run_id)
    algo = records.get("baseline", context.run_config).get("algo")
    if name := records.get("round", ConfigRecord()).get("run_name"):
        run = f"{name!s} ({run})"
    settings = digest_of(context.run_config)
    return printable(f"run {run}, settings {settings}, {algo!s}, {meta.message_type} {meta.group_id}")


def _in_one_line(asked: str, content: RecordDict) -> str:
    """List what has left a site, for its own log."""
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
