"""The process that handles one message: ``flwr-clientapp``, with the code installed at the site.

    python -P client_process.py APP fork|spawn    APP: the folder of that code

With "fork" it handles no message itself: it imports what every message needs, and then forks for
each (`tools/task_process.py`).
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from flwr.clientapp import ClientApp

from protofl_common.basics.text import printable
from protofl_common.experiment.catalog import CATALOG
from protofl_common.tools.flower import (
    clientapp_process,
    console_script,
    get_load_client_app_fn,
    inflate_object_from_contents,
    iterate_object_tree,
    keep_log_short,
    pull_parts,
)
from protofl_common.tools.task_process import end_with_parent, handle_tasks, import_ahead

LARGEST = 2**32 + 2**28  # bytes of arrays in a message: two models of 2 GiB, and vectors
AHEAD = ("torch", "torch._dynamo", "httpcore", "filelock", "numpy.ma")
"""Modules that the process of every message needs, imported before it is forked.

Their import is a third of a message's processor time. Optimizers need `torch._dynamo`.
"""
flwr_clientapp = console_script("flwr-clientapp")


def installed_code(app: str) -> Callable[[str, str, str], ClientApp]:
    """Return a function that loads the ClientApp in the folder ``app``, whatever run it is for.

    It takes the place of Flower's, which loads that of the run's bundle.
    """
    return get_load_client_app_fn("client_app.app:app", app, multi_app=False)


def received(
    tree: Any, pull: Callable[[str], bytes], confirm: Callable[[str], None], **_: Any
) -> Any:
    """Fetch a message, in the place of Flower's function; end this process if it cannot be read.

    ``tree`` names the message's parts. ``pull`` fetches a part by its name, and ``confirm`` says
    that all have come. The process ends without a reply, as then the SuperNode answers for it; for
    the reply of a task that ends in order the SuperNode would wait for ever.
    """
    try:
        from protofl_common.wire.envelope import check_parts  # which imports PyTorch

        # a set: one part may be in the message many times
        names = list({part.object_id for part in iterate_object_tree(tree)})
        parts = pull_parts(names, pull)
        check_parts(parts, LARGEST)  # raises what is wrong with them, before they are decoded
        confirm(tree.object_id)
        return inflate_object_from_contents(tree.object_id, parts)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        print(printable(f"protofl: a message that cannot be read: {reason}"), file=sys.stderr)
        os._exit(1)


def handle(app: str, arguments: list[str]) -> None:
    """Handle one message: be ``flwr-clientapp`` with these arguments, with the code in ``app``.

    Where no reply is sent, the process ends at once, and the SuperNode answers in its place.
    """
    end_with_parent()
    sys.argv[1:] = arguments
    with clientapp_process(received, installed_code(app), give_up=lambda: os._exit(1)):
        flwr_clientapp()


if __name__ == "__main__":
    _, folder, start_method = sys.argv
    keep_log_short()
    load = partial(installed_code(folder), "", "", "")  # id, version and hash of no bundle
    halves = [row.client for row in CATALOG.values()]
    prepare = partial(import_ahead, AHEAD, load, halves)
    handle_tasks(start_method, prepare, partial(handle, folder))
