"""The process that handles one message: ``flwr-clientapp``, but with code that the site's operator has chosen.

    python -P client_process.py APP ALLOW …    where ALLOW is "installed" or SHA-256 hashes of bundles, with commas

The rest are arguments of ``flwr-clientapp``. Without any it handles no message itself: it imports what every message
needs and then forks for each line of its standard input, a list of such arguments in JSON.

Flower would unpack and import the bundle that the run brought. Here, with "installed", nothing of it is used: the code
is that of the folder APP. Else the bundle is hashed first, and if it is none of the allowed,
the reply is an error and nothing of it is unpacked. This file is run by its path and imports nothing of ProtoFL, whose
modules would else take the place of the bundle's.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any
from unittest.mock import patch

from flwr.app import Context, Error, Message
from flwr.cli.install import install_from_fab
from flwr.clientapp.utils import get_load_client_app_fn
from flwr.common.constant import ErrorCode
from flwr.supercore.utils import get_flwr_home
from flwr.supernode.cli import flwr_clientapp
from flwr.supernode.runtime import run_clientapp

INSTALLED = "installed"
Handler = Callable[[Message, Context], Message]


class AllowedCode:
    """What Flower's process calls in place of its own installing and loading of a bundle."""

    def __init__(self, app: str, allow: str) -> None:
        self.app, self.allow = app, allow
        self.bundle = b""

    def install(self, bundle: bytes, **_: Any) -> None:
        """Take the bundle; it stays packed until `load` has hashed it."""
        self.bundle = bundle

    def loader(self, **_: Any) -> Callable[..., Handler]:
        """What Flower calls with the run's app, version and hash, as the SuperLink says them."""
        return self.load

    def load(self, *identity: str) -> Handler:
        """The ClientApp to run, or what refuses every message."""
        if self.allow == INSTALLED:
            return get_load_client_app_fn("client_app.app:app", self.app, multi_app=False)(*identity)
        found = hashlib.sha256(self.bundle).hexdigest()
        if found not in self.allow.split(","):
            return Refusal(found, self.allow)
        folder = install_from_fab(self.bundle, get_flwr_home() / "allowed" / found, skip_prompt=True)
        return get_load_client_app_fn("", str(folder), multi_app=True)(*identity)


class Refusal:
    """Answers every message with an error that names the site and the hashes, and logs it."""

    def __init__(self, found: str, allow: str) -> None:
        self.found, self.allow = found, allow

    def __call__(self, message: Message, context: Context) -> Message:
        """The error reply."""
        site = context.node_config.get("site-name", "this site")
        text = f"{site}: refused the run's code, bundle {self.found}; its operator allows {self.allow}"
        print(f"protofl: {text}", file=sys.stderr, flush=True)
        return Message(Error(ErrorCode.INVALID_FAB, text), reply_to=message)


def handle(code: AllowedCode, arguments: list[str]) -> None:
    """Handle the message that the arguments of ``flwr-clientapp`` name, and exit."""
    sys.argv[1:] = arguments
    # an error where another version of Flower has no such names
    with patch.multiple(run_clientapp, install_from_fab=code.install, get_load_client_app_fn=code.loader):
        flwr_clientapp()


def fork_for_each_message(code: AllowedCode) -> None:
    """Until standard input ends, which it does when the executor does.

    A child begins with PyTorch and the installed code imported, and with nothing of any run: this process sees no
    message and no bundle. It must have one thread only, and never use CUDA, for neither survives a fork.
    """
    with suppress(Exception):  # the child will meet the error again, and answer with it
        import_module("torch")
        if code.allow == INSTALLED:
            code.load("", "", "")
    gc.freeze()  # or collecting in a child would copy all pages
    signal.signal(signal.SIGCHLD, _reap)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            handle(code, json.loads(line))
            break  # this is the child: the other lines are not its own


def _reap(*_: Any) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main() -> None:
    """The command."""
    app, allow, *arguments = sys.argv[1:]
    code = AllowedCode(app, allow)
    if arguments:
        handle(code, arguments)
    else:
        fork_for_each_message(code)


if __name__ == "__main__":
    main()
