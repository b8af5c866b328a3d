"""The process that handles one message: ``flwr-clientapp``, but with the code that is installed at the site.

    python -P client_process.py APP …    the folder of that code

The rest are arguments of ``flwr-clientapp``. Without any it handles no message itself: it imports what every message
needs and then forks for each line of its standard input, a list of such arguments in JSON.
"""

import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any
from unittest.mock import patch

from flwr.clientapp import ClientApp
from flwr.clientapp.utils import get_load_client_app_fn
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects
from flwr.supernode.cli import flwr_clientapp
from flwr.supernode.runtime import run_clientapp

from protofl_common.basics.text import printable
from protofl_common.experiment.catalog import CATALOG, half

LARGEST = 2**32 + 2**28  # Bytes of arrays in a message: two models of 2 GiB, and vectors
AHEAD = ("torch", "httpcore", "filelock", "numpy.ma")  # what each message would import: a third of its processor time


def installed_code(app: str) -> Callable[[str, str, str], ClientApp]:
    """Return the function with which Flower loads a run's ClientApp: it loads that of the folder ``app``, always."""
    return get_load_client_app_fn("client_app.app:app", app, multi_app=False)


@contextmanager
def or_end(what: str) -> Iterator[None]:
    """Name an error and end at once: the SuperNode answers for a process that is gone; for an ended task it waits."""
    try:
        yield
    except Exception as error:
        print(printable(f"protofl: {what}: {type(error).__name__}: {error}"), file=sys.stderr)
        os._exit(1)


@or_end("a message that cannot be read")
def received(tree: Any, pull: Callable[[str], bytes], confirm: Callable[[str], None], **_: Any) -> Any:
    from protofl_common.wire.envelope import check_parts  # which imports PyTorch

    names = list({part.object_id for part in iterate_object_tree(tree)})  # one may be there many times
    parts = pull_objects(names, pull, initial_backoff=0.05)  # Flower's second is longer than our start takes
    check_parts(parts, LARGEST)
    confirm(tree.object_id)
    return inflate_object_from_contents(tree.object_id, parts)


def handle(app: str, arguments: list[str]) -> None:
    sys.argv[1:] = arguments
    with (  # an error where another version of Flower has no such names
        patch.object(run_clientapp, "pull_and_inflate_object_from_tree", received),
        patch.object(run_clientapp, "push_message", or_end("a reply that cannot be sent")(run_clientapp.push_message)),
        patch.object(run_clientapp, "install_from_fab", lambda *_, **__: None),
        patch.object(run_clientapp, "get_load_client_app_fn", lambda **_: installed_code(app)),
    ):
        flwr_clientapp()


def fork_for_each_message(app: str) -> None:
    """Until standard input ends, which it does when the executor does.

    This process sees no message and no bundle. It must have one thread only and never use CUDA: no fork survives these.
    """
    with suppress(Exception):  # the child will meet the error again, and answer with it
        for name in AHEAD:
            import_module(name)
        installed_code(app)("", "", "")
        for row in CATALOG.values():
            half(row.client, object)
    gc.freeze()  # or collecting in a child would copy all pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a child, and none is left as a zombie
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            try:
                handle(app, json.loads(line))
            except BaseException as end:  # Flower's own is a SystemExit
                if not isinstance(end, SystemExit):
                    sys.excepthook(type(end), end, end.__traceback__)
            sys.stdout.flush()
            os._exit(0)  # all is sent; to end as Python does, module by module, would take longer than most messages


if __name__ == "__main__":
    _, folder, *words = sys.argv
    if words:
        handle(folder, words)
    else:
        fork_for_each_message(folder)
