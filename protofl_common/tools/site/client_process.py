"""The process that handles one message: ``flwr-clientapp``, but with code that the site's operator has chosen.

    python -P client_process.py APP ALLOW …    where ALLOW is "installed" or SHA-256 hashes of bundles, with commas

Flower would unpack and import the bundle that the run brought. Here, with "installed", nothing of it is used: the code
is that of the folder APP. Else the bundle is hashed first, and if it is none of the allowed,
the reply is an error and nothing of it is unpacked. This file is run by its path and imports nothing of ProtoFL, whose
modules would else take the place of the bundle's.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
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


def main() -> None:
    """Handle the message that the arguments of ``flwr-clientapp`` name."""
    code = AllowedCode(sys.argv.pop(1), sys.argv.pop(1))
    # an error where another version of Flower has no such names
    with patch.multiple(run_clientapp, install_from_fab=code.install, get_load_client_app_fn=code.loader):
        flwr_clientapp()


if __name__ == "__main__":
    main()
