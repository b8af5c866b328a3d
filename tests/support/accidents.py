"""What happens to a run: the server dies at a place of a round, a client fails, a disk flips a bit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Error, Message, MessageType

from server_app import app as app_module
from server_app import round as round_module
from server_app.callbacks import checkpoints as checkpoint_files
from server_app.replies import RoundResult
from tests.support.attacks import from_node, when
from tests.support.harness import Tamper, run_federation

CLIENTS = 4


class Killed(BaseException):
    """Stands in for SIGKILL: no handler of the code under test sees it."""


def on_message(kind: str, number: int) -> Tamper:
    """The server dies when some clients have done their work of a round, and others have not."""
    seen: list[Message] = []

    def tamper(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == kind and message.metadata.group_id == str(number):
            seen.append(reply)
            if len(seen) == 2:
                raise Killed
        return reply

    return tamper


@contextmanager
def instead(owner: object, name: str, number: int, *, after: bool = False) -> Iterator[None]:
    """The server dies in the place of a call for a round, or right after it."""
    original: Callable[..., Any] = getattr(owner, name)

    def call(*arguments: Any) -> Any:
        if round_of(arguments) != number:
            return original(*arguments)
        if after:
            original(*arguments)
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        yield


def round_of(arguments: tuple[Any, ...]) -> int:
    """The round of a call, as a number or as what is expected in it."""
    (number,) = {one for one in arguments if type(one) is int} or {
        one.number for one in arguments if isinstance(one, RoundResult)
    }
    return int(number)


PLACES: dict[str, tuple[object, str, bool] | None] = {
    "while the clients train": None,
    "before the merging": (round_module, "_merge", False),
    "after the merging": (app_module, "train_round", True),
    "before the checkpoint": (checkpoint_files, "write_checkpoint", False),
    "after the checkpoint": (checkpoint_files, "write_checkpoint", True),
}


FINAL = "while the clients evaluate"


def stop(config: dict[str, Any], place: str, number: int, run_id: int = 1) -> None:
    """Run until the server dies at a place of a round, or of the final evaluation after so many."""
    where = PLACES.get(place)
    tamper = (
        on_message(MessageType.EVALUATE if place == FINAL else MessageType.TRAIN, number)
        if not where
        else None
    )
    dying = instead(where[0], where[1], number, after=where[2]) if where else nullcontext()
    with dying, pytest.raises(Killed):
        run_federation(config, CLIENTS, tamper, run_id=run_id)


def on_round(number: int, node: int, change: Any) -> Tamper:
    """Replace one client's training reply of one round by ``change(message, reply)``."""
    return when(change, MessageType.TRAIN, node, number)


def fails(message: Message, reply: Message) -> Message:
    return from_node(message, Message(Error(0, "actor died"), reply_to=message))


def flip_a_bit(path: Path, bit: int) -> None:
    """What a bad disk does; below 0: counted from the end."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
