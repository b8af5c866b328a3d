"""The ClientApp: unpack -> algorithm -> protections -> pack. One exchange per round carries evaluation and training.

Every handler returns a Message, whatever happens: a failure becomes an error reply with its reason, for which the
server does not wait.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from flwr.app import ConfigRecord, Context, Error, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp

from client_app.client import Client
from client_app.context import CommonSettings
from client_app.eager import without_compiler
from client_app.failures import called, log, reason_of
from client_app.introduction import introduction
from client_app.protections.secure_sum import STAGES, SecureSum
from client_app.statistics import statistics_level, statistics_of
from client_app.trained_model import choose_best
from client_app.visit import Visit
from protofl_common.basics.text import printable
from protofl_common.experiment.node import is_site
from protofl_common.experiment.settings import digest_of
from protofl_common.wire.limits import RefusedMessage
from protofl_common.wire.payloads import Payload, payload_bytes
from protofl_common.wire.records import pack_site_card, unpack_baseline, unpack_best, unpack_instructions
from protofl_common.wire.schema import statistics_declared
from protofl_common.wire.secagg import FINAL, pack_by_site

app = ClientApp()

ERROR_CODE = 2
"""Flower's code for "the ClientApp raised an exception"."""


@app.query()
def introduce(message: Message, context: Context) -> Message:
    """Before the first round: who this site is. Prepares the data, so that what is wrong with them shows now."""
    return _answer(message, context, lambda: RecordDict({"site": pack_site_card(introduction(message, context))}))


@app.train()
def train_round(message: Message, context: Context) -> Message:
    """A round: evaluate what was received, train, upload."""
    without_compiler()
    return _answer(message, context, lambda: _train_round(Visit(message, context)))


@app.evaluate()
def final_evaluation(message: Message, context: Context) -> Message:
    """After the last round: evaluate only, and send what the report may show; then hear which round was the best."""
    return _answer(message, context, lambda: _final_evaluation(message, context))


def stage(name: str, final: bool, message: Message, context: Context) -> Message:
    """A stage of a sum without training (`secure_sum.py`), in a round or in the final evaluation."""
    return _answer(message, context, lambda: _stage(name, final, message, context))


for name in STAGES:
    app.query(name)(partial(stage, name, False))
    app.query(name + FINAL)(partial(stage, name, True))


def _train_round(visit: Visit) -> RecordDict:
    with visit.answered():
        if visit.instructions.evaluate:
            visit.evaluate()
        upload, losses = visit.train()
        return visit.reply(upload, losses, visit.client.settings.exchange.up)


def _final_evaluation(message: Message, context: Context) -> RecordDict:
    best, chosen_on = unpack_best(message.content)
    if chosen_on:
        client = Client(context, unpack_baseline(message.content))
        choose_best(client.folders.states(unpack_instructions(message.content)), best, chosen_on)
        return RecordDict()
    visit = Visit(message, context)
    with visit.answered():
        visit.evaluate()
        level = statistics_level(visit.client)
        statistics = None if level == "none" else statistics_of(visit.client, visit.algorithm, level)
        with visit.clock("save"):
            visit.leave_model()
            visit.states.finish(visit.instructions.round)
        return visit.reply(Payload(statistics=statistics), {}, statistics_declared(level))


def _stage(name: str, final: bool, message: Message, context: Context) -> RecordDict:
    client = Client(context, unpack_baseline(message.content))
    if not client.settings.privacy.secagg:
        raise RefusedMessage("a stage of secure aggregation, which the run's settings do not ask for")
    its_sum = SecureSum(client, unpack_instructions(message.content), final)
    return RecordDict({**pack_by_site(getattr(its_sum, name)(message.content))})


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
