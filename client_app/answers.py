"""The answer to a message: a reply, or an error with its reason.

Either way the server need not wait any longer. Errors about data, weights and states may name
files, folders and classes, or quote their content. A site says of those only the kind, and the
setting that they are about. A simulated client's log is the server's: it says the whole text.
"""

import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Error, Message, MessageType, RecordDict

from client_app.learning.training import TrainingError
from client_app.site import audit
from client_app.site.consent import WaitingForApproval, site_key
from client_app.site.hooks import REFUSED, tell_of_trouble
from client_app.site.log import UntoldError, log, log_once
from client_app.site.record import LedgerError, StateError
from client_app.site.state import LostStateError
from protofl_common.backbones.load import BackboneError
from protofl_common.basics.faults import fault_of
from protofl_common.basics.text import is_site_name, printable, without_paths
from protofl_common.config.options import SettingsError, read_section
from protofl_common.config.sections import StudySettings
from protofl_common.data import DataError
from protofl_common.experiment.node import NODE_KEYS, is_site, site_folder, site_name
from protofl_common.experiment.settings import digest_of, known_keys
from protofl_common.experiment.study import about_site, study_id
from protofl_common.wire import envelope
from protofl_common.wire.payloads import payload_bytes, summary_of
from protofl_common.wire.records import AUDIT
from protofl_common.wire.refusal import Refusal, pack_refusal
from protofl_common.wire.schema import RefusedMessage

ERROR_CODE = 2  # Flower's code for "the ClientApp raised an exception"
OPEN_ERRORS = (SettingsError, TrainingError, RefusedMessage)
"""Errors whose texts are of settings, the model's names, and what the server sent."""
GPU_MEMORY_FULL = (
    "the GPU has no memory left; let fewer clients share it (protofl run --gpus 1), "
    "or take a smaller batch-size"
)
MEMORY_FULL = (
    "the machine has no memory left; "
    "take a smaller batch-size, image-size, text-length or feature-dim"
)
KINDS: dict[type[Exception], str] = {  # What a site says instead of the text
    DataError: "its data cannot be read or divided as the run asks",
    StateError: "its state (models, requests, counts) cannot be read or written",
    LedgerError: "its privacy ledger cannot be read or written",
    audit.AuditError: "its audit log cannot be written",
    BackboneError: "a frozen backbone cannot be had",
}
UNEXPECTED = "an unexpected error"


def answered(
    work: Callable[[Message, Context], RecordDict],
) -> Callable[[Message, Context], Message]:
    """Make a handler that replies with what ``work`` returns, or with the reason why it did not."""

    @wraps(work)
    def handler(message: Message, context: Context) -> Message:
        node = context.node_config
        at_site = is_site(node)
        in_envelope = envelope.NAME in message.content
        message.content = envelope.take_out(message.content)
        about: dict[str, Any] = {}
        asked = ""
        if at_site:
            about = _about(message, context)
            asked = _asked(about, digest_of(context.run_config))

        try:
            content = work(message, context)
            if at_site:
                head = audit.append(site_folder(node), **about, **summary_of(content))
                log("INFO", f"{asked}: {_sent(content)}")
                content = RecordDict({**content, AUDIT: ConfigRecord({"head": head})})
            if in_envelope:
                content = envelope.put_in(content)
            return Message(content, reply_to=message)
        except Exception as error:
            refusal = _refusal(error, context, about, asked)
            is_query = message.metadata.message_type == MessageType.QUERY
            if is_query and at_site and is_site_name(site_name(node)):
                # the server does not know yet who this is
                refusal = replace(refusal, site=site_name(node), signature=_signature(context))
            return Message(Error(ERROR_CODE, pack_refusal(refusal)), reply_to=message)

    return handler


def _refusal(error: Exception, context: Context, about: Mapping[str, Any], asked: str) -> Refusal:
    """Log an error, at a site in its audit log too, and return what may leave of it."""
    at_site = is_site(context.node_config)
    config = context.run_config
    is_private = config.get("dp") != "none" or bool(config.get("secagg"))
    reason = reason_of(error, at_site, asked, is_private)
    if not at_site:
        return Refusal(reason, "lost-state" if isinstance(error, LostStateError) else "failed")
    waits = isinstance(error, WaitingForApproval)
    if not waits:
        tell_of_trouble(context.node_config, REFUSED)
    try:
        reason, appended = audit.refuse(site_folder(context.node_config), reason, waits, **about)
    except audit.AuditError as full:
        return Refusal(reason_of(full, at_site, asked))
    if waits and appended:  # the server asks every few seconds, perhaps for days
        log("INFO", f"{asked}: {error}")
    return Refusal(reason, "waiting" if waits else "failed")


def _signature(context: Context) -> str:
    """Return the site's signature of its refusal where a study names sites, else "".

    No other refusal ends the wait for it.
    """
    node = context.node_config
    study = read_section(StudySettings, context.run_config, [])
    with suppress(OSError, ValueError, StateError):
        if study and study.study_sites:
            about = about_site(study, site_name(node), context.run_id, "refusal")
            return site_key(site_folder(node)).sign(about).hex()
    return ""


def _about(message: Message, context: Context) -> dict[str, Any]:
    """Return what a message is about, for a log, whatever its records have.

    Of a message about a baseline, the algorithm is the baseline's.
    """
    records = message.content.config_records
    instructions = records.get("round", ConfigRecord())
    run_name = str(instructions.get("run_name", ""))
    number = instructions.get("round")
    if type(number) is not int:
        number = 0
    algo = str(records.get("baseline", context.run_config).get("algo"))
    return {
        "kind": message.metadata.message_type,
        "run": context.run_id,
        "name": printable(run_name),
        "round": number,
        "study": study_id(context.run_config),
        "algo": printable(algo),
    }


def _asked(about: Mapping[str, Any], settings: str) -> str:
    run = f"{about['name']} ({about['run']})" if about["name"] else about["run"]
    question = f"{about['algo']}, {about['kind']} {about['round']}"
    return printable(f"run {run}, settings {settings}, {question}")


def _sent(content: RecordDict) -> str:
    text = f"sent {', '.join(content)}, {payload_bytes(content):,} bytes of arrays"
    card = content.config_records.get("site")
    if card:
        text += f"; its classes: {', '.join(map(str, card['classes']))}"  # type: ignore[arg-type]
    return text


def reason_of(error: Exception, at_site: bool, asked: str = "", private: bool = False) -> str:
    """Log ``error`` and what was ``asked``, and return the reason for the server.

    The reason is one line, with nothing of a site's files. With ``private`` (dp, secagg) a site
    does not say of which kind an unexpected error is: single samples may cause it.
    """
    if isinstance(error, torch.OutOfMemoryError):
        error = TrainingError(GPU_MEMORY_FULL)
    elif isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        error = TrainingError(MEMORY_FULL)  # the one is NumPy's, the other PyTorch's on a CPU

    is_expected = isinstance(error, (*OPEN_ERRORS, *KINDS, UntoldError))
    if is_expected:
        text = str(error)
    elif isinstance(error, OSError):  # of the machine
        text = f"{type(error).__name__}: {error}"
    else:
        text = fault_of(error)
    if not isinstance(error, WaitingForApproval):
        say = log if at_site else log_once
        say("ERROR", f"{asked}: {text}" if asked else text)
    if not is_expected:
        for line in "".join(traceback.format_exception(error)).splitlines():
            print("   ", printable(line), file=sys.stderr, flush=True)

    if at_site and not isinstance(error, OPEN_ERRORS):
        kind = _kind_of(error)
        if isinstance(error, UntoldError) or (private and not is_expected):
            kind = UNEXPECTED
        text = f"{kind}; the log of the site says more"
    return printable(without_paths(text))


def _kind_of(error: Exception) -> str:
    """Return what a site says of an error: its kind, and the setting with which its text begins."""
    first_word = str(error).partition(" ")[0].rstrip(":,")
    about = f" ({first_word})" if first_word in {*known_keys(), *NODE_KEYS} else ""
    return f"{type(error).__name__}{about}: {KINDS.get(type(error), UNEXPECTED)}"
