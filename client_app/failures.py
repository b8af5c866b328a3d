"""Errors of a client: the whole error goes to its own log, and the server gets what may leave this machine.

Errors about data, weights and states may name files, folders and classes, or quote their content. A site says of those
only the kind, and the setting that they are about. A simulated client's log is the server's, so it says the whole text.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Mapping
from datetime import datetime

import torch

from client_app.state import LedgerError, StateError
from client_app.training import TrainingError
from protofl_common.backbones.network import BackboneError
from protofl_common.basics.text import LONGEST_IN_LOG, is_site_name, printable, without_paths
from protofl_common.config.options import SettingsError
from protofl_common.data import DataError
from protofl_common.experiment.node import is_site, site_name
from protofl_common.experiment.settings import NODE_KEYS, known_keys
from protofl_common.wire.limits import RefusedMessage

OPEN = (SettingsError, TrainingError, RefusedMessage)
"""Their texts are made of settings, of the model's own names, and of what the server sent."""
FULL = "the GPU has no memory left; let fewer clients share it (protofl run --gpus 1), or take a smaller batch-size"
KINDS: dict[type[Exception], str] = {
    DataError: "its data cannot be read or divided as the run asks",
    StateError: "its model of this run cannot be read or written",
    LedgerError: "its privacy ledger cannot be read or written",
    BackboneError: "a frozen backbone cannot be had",
}
"""What a site says instead of the text."""
UNEXPECTED = "an unexpected error"


def reason_of(error: Exception, at_site: bool, asked: str = "", private: bool = False) -> str:
    """Log ``error``, and what was ``asked``; the reason for the server: one line, nothing of a site's files.

    With ``private``, under differential privacy, a site does not say of which kind an unexpected error is: single
    samples may cause it.
    """
    if isinstance(error, torch.OutOfMemoryError):
        error = TrainingError(FULL)
    expected = isinstance(error, (*OPEN, *KINDS))
    text = str(error) if expected else f"{type(error).__name__}: {error}"
    log("ERROR", f"{asked}: {text}" if asked else text)
    if not expected:
        for line in "".join(traceback.format_exception(error)).splitlines():
            print("   ", printable(line), file=sys.stderr, flush=True)
    if at_site and not isinstance(error, OPEN):
        text = _of_a_site(error) if expected or not private else f"{UNEXPECTED}; the log of the site says more"
    return printable(without_paths(text))


def log(level: str, text: str) -> None:
    """A line with its time on standard error, which a SuperNode hands on to wherever its own goes.

    It is one line whatever ``text`` has: a run's settings must not write lines of their own.
    """
    line = f"{datetime.now().astimezone():%Y-%m-%dT%H:%M:%S%z} {level} protofl: {printable(text, LONGEST_IN_LOG)}"
    print(line, file=sys.stderr, flush=True)


def called(node: Mapping[str, object]) -> str:
    """``site NAME:`` before a reason; "" for a simulated client, and for a name that is none."""
    return f"site {name}: " if is_site(node) and is_site_name(name := site_name(node)) else ""


def _of_a_site(error: Exception) -> str:
    """The kind of error, and the setting with which its text begins."""
    key = re.match(r"[a-z-]*", str(error))
    about = f" ({key[0]})" if key and key[0] in {*known_keys(), *NODE_KEYS} else ""
    kind = KINDS.get(type(error), UNEXPECTED)
    return f"{type(error).__name__}{about}: {kind}; the log of the site says more"
