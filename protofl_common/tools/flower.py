"""Flower's private names that commands need, and the processes of a site and of a worker.

The others are in `protofl_common/flower.py`. What Flower takes a second to import is imported by
the function that needs it. A context manager here that takes the place of Flower's functions raises
SettingsError when it is made, before anything has started, where Flower lacks one of them.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, redirect_stdout
from functools import partial
from importlib import import_module
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, NoReturn

from flwr.app import Error
from flwr.clientapp import ClientApp

from protofl_common.basics.replaced import replaced
from protofl_common.config.options import Config
from protofl_common.flower import ErrorCode, needing_flowers_names

FIRST_RETRY_SECONDS = 0.05  # Flower waits a second for a late part of a message
OF_A_MESSAGE = ("[RUN ", "Receiv", "Sending", "Sent ", "Start `flwr-clientapp` process")
"""How Flower's lines on a message begin."""
APP_ERROR = "ServerApp failed with exception"  # how Flower begins to say that the app raised one

with needing_flowers_names():
    # the function with which a process of a message loads the ClientApp
    from flwr.clientapp.utils import get_load_client_app_fn

    # a node config, as flower-supernode reads it
    from flwr.common.config import parse_config_args

    # the seconds that a site's clock may be behind or ahead, and those that a process has from when
    # Flower gives out its task to its first call; the states of a task that may still be worked on
    from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL as TASK_START_SECONDS
    from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE, Status, SubStatus

    # Flower's log
    from flwr.common.logger import update_console_handler

    # what a SuperLink says of its nodes and runs
    from flwr.common.serde import run_from_proto
    from flwr.proto.control_pb2 import ListNodesRequest, ListRunsRequest
    from flwr.proto.node_pb2 import NodeInfo

    # the tasks that an executor gets, and what it answers
    from flwr.supercore.constant import TaskType

    # the end of a process in which threads of Flower are left
    from flwr.supercore.exit import ExitCode, flwr_exit

    # the parts of a message: their names, fetched, and put together
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
    from flwr.supercore.inflatable.inflatable_utils import (
        inflate_object_from_contents,
        pull_objects,
    )
    from flwr.supercore.run import Run
    from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult
    from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor

    # the folder in which a SuperNode has its files
    from flwr.supercore.utils import get_flwr_home


def console_script(name: str) -> Callable[[], None]:
    """Import one of the commands that Flower installs, such as ``flower-supernode``."""
    with needing_flowers_names():
        loaded: Callable[[], None] = distribution("flwr").entry_points[name].load()
    return loaded


def _replaced_in(module: str, **ours: object) -> AbstractContextManager[None]:
    """Replace names of one of Flower's modules by ours while the context is open.

    SettingsError if the module lacks one of the names: at once, not when the context is entered.
    """
    with needing_flowers_names():
        return replaced(import_module(module), **ours)


# -- the log of a site
def _is_for_operators(record: logging.LogRecord) -> bool:
    """True for warnings, and for other lines that are neither empty nor on a single message."""
    text = record.getMessage().strip()
    is_of_message = text.startswith(OF_A_MESSAGE)
    return record.levelno >= logging.WARNING or bool(text and not is_of_message)


def keep_log_short() -> None:
    """Make Flower's log one for operators: with the time, and without colours.

    Its lines on single messages are left out, as our own log has a line for each message. Nothing
    is changed if the operator has set FLWR_LOG_LEVEL.
    """
    if "FLWR_LOG_LEVEL" in os.environ:
        return
    update_console_handler(timestamps=True, colored=False)
    for handler in logging.getLogger("flwr").handlers:
        handler.addFilter(_is_for_operators)


# -- messages and tasks
pull_parts = partial(pull_objects, initial_backoff=FIRST_RETRY_SECONDS)
"""Fetch the parts of a message by their names."""


def handing_tasks_to(executor: SubprocessExecutor) -> AbstractContextManager[None]:
    """While the context is open, have Flower's loop hand the tasks it gets to ``executor``."""
    module = "flwr.supercore.superexec.run_superexec"
    return _replaced_in(module, get_executor=lambda *_, **__: executor)


def ask_for_tasks(address: str, secret: bytes, supernode: int) -> None:
    """Run Flower's loop, which asks the SuperNode at ``address`` for tasks.

    The loop ends when the process ``supernode``, given by its number, ends. The SuperNode knows it
    by the ``secret``; the connection is unencrypted, as it stays within this machine.
    """
    from flwr.supercore.superexec.run_superexec import run_superexec

    run_superexec(address, insecure=True, superexec_auth_secret=secret, parent_pid=supernode)


def clientapp_process(
    fetch: Callable[..., Any], load: Callable[..., ClientApp], give_up: Callable[[], None]
) -> AbstractContextManager[None]:
    """While the context is open, have ``flwr-clientapp`` use our functions.

    It fetches its message by ``fetch`` and its ClientApp by ``load``, and installs no bundle. If a
    task ended without an error and without a reply, the SuperNode would wait for ever, so
    ``give_up`` is called instead.
    """
    with needing_flowers_names():
        from flwr.supernode.runtime import run_clientapp

        push_to_flower = run_clientapp.push_message
        end_with_flower = run_clientapp.push_task_output
    has_replied = False  # until Flower has sent the task's reply

    def push_message(*arguments: Any) -> None:
        nonlocal has_replied
        push_to_flower(*arguments)
        has_replied = True

    def push_task_output(**arguments: Any) -> None:
        if has_replied:
            end_with_flower(**arguments)
        else:
            give_up()

    return _replaced_in(
        run_clientapp.__name__,
        pull_and_inflate_object_from_tree=fetch,
        push_message=push_message,
        push_task_output=push_task_output,
        install_from_fab=lambda *_, **__: None,
        get_load_client_app_fn=lambda **_: load,
    )


class SuperNodeTasks:
    """The tasks of a SuperNode: a message makes one, and a process takes it and replies."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def are_open(self) -> bool:
        """Return whether a reply to a message may still come."""
        not_started = self.state.get_tasks(statuses=[Status.PENDING, Status.STARTING])
        return bool(not_started) or self.are_running()

    def are_running(self) -> bool:
        """Return whether a process works on a message; Flower tells by the process's heartbeat."""
        return bool(self.state.get_tasks(statuses=[Status.RUNNING]))

    def answer(self, why: str) -> bool:
        """Answer all messages that have no reply by the error ``why``; return if there was any.

        Flower's own function for this is meant for processes that are gone: it answers only
        messages that a process had fetched. So all others are marked as fetched first.
        """
        unfetched = self.state.get_messages_legacy(is_reply=False)
        for message in unfetched:
            self.state.record_message_processing_start(message.metadata.message_id)
        runs = {task.run_id for task in self.state.get_tasks()}
        messages_before = len(self.state.msg_store)
        self.state._store_error_replies(runs, Error(int(ErrorCode.CLIENT_APP_CRASHED), why))
        return len(self.state.msg_store) > messages_before  # the replies lie there, too


def supernode_process(
    clock: object,
    settings: Callable[[bytes, Run], Config],
    watch: Callable[[SuperNodeTasks], None],
) -> AbstractContextManager[None]:
    """While the context is open, have ``flower-supernode`` use our clock, settings and watch.

    ``clock`` takes the place of the module `time`: it needs a ``sleep``. ``settings`` returns the
    settings of a run, in the place of Flower's function that would read them in the run's bundle.
    ``watch`` is called with the tasks each time before the SuperNode sends the replies that are
    ready. Parts of messages are fetched by `pull_parts`.
    """
    with needing_flowers_names():
        from flwr.supernode import start_client_internal

        push_messages = start_client_internal._push_messages

    def watched(*, state: Any, **arguments: Any) -> None:
        watch(SuperNodeTasks(state))
        push_messages(state=state, **arguments)

    return _replaced_in(
        start_client_internal.__name__,
        time=clock,
        get_fused_config_from_fab=settings,
        pull_objects=pull_parts,
        _push_messages=watched,
    )


def end_supernode(why: str) -> NoReturn:
    """End the process and the threads that Flower has left in it, as after a lost connection.

    Flower prints ``why``.
    """
    flwr_exit(ExitCode.SUPERNODE_CONNECTION_ERROR, why)


def serverapp_process(
    folder: Path, settings: Callable[[object, Config], Config], run: Callable[..., Any]
) -> AbstractContextManager[None]:
    """While the context is open, ``flwr-serverapp`` calls ``run``, and installs no bundle.

    ``run`` takes the place of Flower's function that runs a bundle's ServerApp.
    ``settings(folder, submitted)`` returns all settings of a run by those that were submitted, in
    the place of Flower's function that reads the bundle's defaults.
    """
    return _replaced_in(
        "flwr.superlink.runtime.run_serverapp",  # a function of the same name hides the module
        install_from_fab=lambda *_, **__: None,
        get_fab_metadata=lambda _: ("", ""),
        get_project_dir=lambda *_: folder,
        get_fused_config_from_dir=settings,
        run_=run,
    )


# -- a SuperLink that is asked
def superlink_named(name: str) -> Any:
    """Return Flower's connection (address, certificate) to a SuperLink in its config.toml."""
    read_connection, _, _ = _names_of_flwr()
    return read_connection(name)


def superlink_at(name: str, address: str, root_certificates: str | None) -> Any:
    """Return Flower's connection to a SuperLink that its config.toml need not name.

    By TLS if the file ``root_certificates`` is given, else unencrypted.
    """
    with needing_flowers_names():
        from flwr.cli.typing import SuperLinkConnection
    is_insecure = not root_certificates
    return SuperLinkConnection(name, address, root_certificates, is_insecure)


def has_crashed(run: Run) -> bool:
    """Return whether a run has failed, but not by an error that its ServerApp raised.

    Then its process, the worker or the machine has died. Flower does not call a run failed that
    somebody has stopped.
    """
    status = run.status
    return status.sub_status == SubStatus.FAILED and not status.details.startswith(APP_ERROR)


@contextmanager
def client_of(superlink: Any) -> Iterator[Any]:
    """Yield a client that asks the SuperLink; inside, its errors become ClickException."""
    _, make_client, with_clear_errors = _names_of_flwr()
    with redirect_stdout(sys.stderr):  # Flower prints which SuperLink it uses
        client = make_client(superlink)
    with closing(client), with_clear_errors():
        yield client


def _names_of_flwr() -> tuple[Any, Any, Any]:
    """Import three functions of Flower's command line, for a connection to a SuperLink.

    The first reads the connection in config.toml, the second makes a client of it, the third is a
    context that turns the client's errors into ClickException.
    """
    with needing_flowers_names():
        from flwr.cli.flower_config import read_superlink_connection
        from flwr.cli.utils import flwr_cli_exc_handler, init_http_client_from_connection
    return read_superlink_connection, init_http_client_from_connection, flwr_cli_exc_handler


# -- the check at the start: the contexts above are made, which checks names, and never entered
NONE: Any = None


def require_for_site() -> None:
    """Raise SettingsError if Flower lacks a name that the processes of a site need."""
    console_script("flower-supernode")
    console_script("flwr-clientapp")
    handing_tasks_to(NONE)
    clientapp_process(NONE, NONE, NONE)
    supernode_process(NONE, NONE, NONE)


def require_for_worker() -> None:
    """Raise SettingsError if Flower lacks a name that a worker's processes need."""
    console_script("flower-superexec")
    console_script("flwr-serverapp")
    handing_tasks_to(NONE)
    serverapp_process(NONE, NONE, NONE)


def require_all() -> None:
    """Raise SettingsError if Flower lacks a name that any command or process needs."""
    require_for_site()
    require_for_worker()
    _names_of_flwr()
