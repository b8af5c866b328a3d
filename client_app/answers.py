"""The answer to a message: a reply, or an error with its reason.

Texts of errors about data, weights and states may name files, folders and classes, or quote their
content. A site tells the server only the kind of such an error, and the setting that it is about. A
simulated client tells the whole text, as its log is the server's.
"""

import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, wraps
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Error, Message, MessageType, RecordDict

from client_app.learning.training import TrainingError
from client_app.site import audit
from client_app.site.consent import ApprovalLapsed, WaitingForApproval, site_key
from client_app.site.hooks import REFUSED, tell_of_trouble
from client_app.site.log import UntoldError, log, log_once
from client_app.site.record import LedgerError, StateError
from client_app.site.state import LostStateError
from protofl_common.backbones.load import BackboneError
from protofl_common.basics.faults import fault_of
from protofl_common.basics.text import is_site_name, printable, without_paths
from protofl_common.config.options import SettingsError, read_section
from protofl_common.config.python_names import allowed_modules
from protofl_common.config.sections import StudySettings
from protofl_common.data import DataError
from protofl_common.experiment.node import NODE_KEYS, is_site, site_folder, site_name
from protofl_common.experiment.settings import digest_of, known_keys
from protofl_common.experiment.study import about_site, study_id
from protofl_common.wire import envelope
from protofl_common.wire.payloads import payload_bytes
from protofl_common.wire.records import AUDIT, summary_of
from protofl_common.wire.refusal import Refusal, pack_refusal
from protofl_common.wire.schema import RefusedMessage

ERROR_CODE = 2  # Flower's code for "the ClientApp raised an exception"
OPEN_ERRORS = (SettingsError, TrainingError, RefusedMessage)
"""Errors whose texts a site may send: they tell of settings, weights' names, and the message."""
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
    handle: Callable[[Message, Context], RecordDict],
) -> Callable[[Message, Context], Message]:
    """Make a Flower handler that replies with what ``handle`` returns, or with why it failed.

    At a site, every answer has a line in the audit log, and a reply has the hash of that line.
    """

    @wraps(handle)
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
            content = handle(message, context)
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
    """Log an error, and return what the server may learn of it.

    A site also appends the refusal to its audit log, and starts its operator's ``on-trouble``
    program. ``about`` and ``asked`` say what the message was about.
    """
    at_site = is_site(context.node_config)
    config = context.run_config
    is_private = config.get("dp") != "none" or bool(config.get("secagg"))
    reason = reason_of(error, at_site, asked, is_private, context.run_id)
    if not at_site:
        return Refusal(reason, "lost-state" if isinstance(error, LostStateError) else "failed")
    waits = isinstance(error, WaitingForApproval)
    if not waits or isinstance(error, ApprovalLapsed):
        tell_of_trouble(context.node_config, REFUSED)
    try:
        reason, is_appended = audit.refuse(site_folder(context.node_config), reason, waits, **about)
    except audit.AuditError as audit_error:  # what has no line there must not leave
        return Refusal(reason_of(audit_error, at_site, asked))
    # not each time: the server asks again every few seconds, perhaps for days
    if waits and is_appended:
        log("INFO", f"{asked}: {error}")
    return Refusal(reason, "waiting" if waits else "failed")


def _signature(context: Context) -> str:
    """Return the site's signature of its refusal where the study names sites, else "".

    Without it the server would go on waiting for the site. "" as well where the site's key cannot
    be read, as the refusal must leave all the same.
    """
    node = context.node_config
    study = read_section(StudySettings, context.run_config, [])
    with suppress(OSError, ValueError, StateError):
        if study and study.study_sites:
            about = about_site(study, site_name(node), context.run_id, "refusal")
            return site_key(site_folder(node)).sign(about).hex()
    return ""


def _about(message: Message, context: Context) -> dict[str, Any]:
    """Return what a message is about, for logs, even if its records are not valid.

    For a message about a baseline, the algorithm is the baseline's.
    """
    records = message.content.config_records
    instructions = records.get("round", ConfigRecord())
    run_name = str(instructions.get("run_name", ""))
    number = instructions.get("round")
    if type(number) is not int:  # a bool is an int, too, by isinstance
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
    """Return a line on what a message asks; ``settings`` is their digest."""
    run = f"{about['name']} ({about['run']})" if about["name"] else about["run"]
    question = f"{about['algo']}, {about['kind']} {about['round']}"
    return printable(f"run {run}, settings {settings}, {question}")


def _sent(content: RecordDict) -> str:
    """Return a line on what a reply contains, for the site's log."""
    text = f"sent {', '.join(content)}, {payload_bytes(content):,} bytes of arrays"
    card = content.config_records.get("site")
    if card:
        text += f"; its classes: {', '.join(map(str, card['classes']))}"  # type: ignore[arg-type]
    return text


def reason_of(
    error: Exception, at_site: bool, asked: str = "", private: bool = False, run_id: int = 0
) -> str:
    """Log ``error`` and what was ``asked``, and return the reason for the server, in one line.

    The traceback of an unexpected error is logged too; of simulated clients equal ones only once
    in a run, in each process.

    A site's reason tells nothing of its files. With ``private`` (``dp``, secure aggregation) it
    does not even tell the kind of an unexpected error, as single samples may cause one.
    """
    if isinstance(error, torch.OutOfMemoryError):
        error = TrainingError(GPU_MEMORY_FULL)
    # NumPy raises the first, PyTorch on a CPU a RuntimeError with this text
    elif isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        error = TrainingError(MEMORY_FULL)

    is_expected = isinstance(error, (*OPEN_ERRORS, *KINDS, UntoldError))
    if is_expected:
        text = str(error)
    elif isinstance(error, OSError):  # no fault of the code, such as a full disk
        text = f"{type(error).__name__}: {error}"
    else:
        text = fault_of(error, allowed_modules())
    if not isinstance(error, WaitingForApproval):  # `_refusal` logs that, but not each time
        say = log if at_site else log_once
        say("ERROR", f"{asked}: {text}" if asked else text)
    if not is_expected:
        show = _show if at_site else _show_once
        show("".join(traceback.format_exception(error)), run_id)

    if at_site and not isinstance(error, OPEN_ERRORS):
        kind = _kind_of(error)
        if isinstance(error, UntoldError) or (private and not is_expected):
            kind = UNEXPECTED
        text = f"{kind}; the log of the site says more"
    return printable(without_paths(text))


def _show(trace: str, run_id: int) -> None:
    """Print a traceback in lines that forge none of the log's."""
    for line in trace.splitlines():
        print("   ", printable(line), file=sys.stderr, flush=True)


_show_once = cache(_show)  # once for each ``run_id``


def _kind_of(error: Exception) -> str:
    """Return what a site tells of an error: its kind, and the setting that its text begins with."""
    first_word = str(error).partition(" ")[0].rstrip(":,")
    about = f" ({first_word})" if first_word in {*known_keys(), *NODE_KEYS} else ""
    return f"{type(error).__name__}{about}: {KINDS.get(type(error), UNEXPECTED)}"
