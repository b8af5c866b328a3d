"""What happens to a run: the server dies in a round, a client fails, a disk flips a bit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message, MessageType

from server_app import app as app_module
from server_app import round as round_module
from server_app.callbacks import checkpoints as checkpoint_files
from tests.support.attacks import Change, failing, when
from tests.support.harness import LocalGrid, Tamper, run_federation

CLIENTS = 4


# -- the server dies -----------------------------------------------------------------------------


class Killed(BaseException):
    """Stands in for SIGKILL: no handler of the code under test sees it."""


def on_message(kind: str, number: int) -> Tamper:
    """Let the server die when the second reply to a message of this kind and round is ready.

    Then some clients have done their work, and others have not.
    """
    seen: list[Message] = []

    def tamper(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == kind and message.metadata.group_id == str(number):
            seen.append(reply)
            if len(seen) == 2:
                raise Killed
        return reply

    return tamper


@contextmanager
def dying_call(owner: object, name: str, number: int, *, after: bool) -> Iterator[None]:
    """Let the server die where it calls ``owner.name`` for round ``number``.

    With ``after`` it dies right after the call, otherwise in its place.
    """
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
    """Return the round of a call, which is the only whole number among its arguments."""
    (number,) = {one for one in arguments if type(one) is int}
    return number


TRAINING = "while the clients train"
FINAL = "while the clients evaluate"
CALLS: dict[str, tuple[object, str, bool]] = {
    "before the merging": (round_module, "_merge", False),
    "after the merging": (app_module, "train_round", True),
    "before the checkpoint": (checkpoint_files, "write_checkpoint", False),
    "after the checkpoint": (checkpoint_files, "write_checkpoint", True),
}
PLACES = (TRAINING, *CALLS)
"""Places of a round at which a server may die."""


def run_until_stopped(config: dict[str, Any], place: str, number: int, run_id: int = 1) -> None:
    """Run until the server dies at one of `PLACES` of round ``number``.

    At the place `FINAL` it dies in the final evaluation after so many rounds.
    """
    if place in CALLS:
        owner, name, after = CALLS[place]
        with dying_call(owner, name, number, after=after), pytest.raises(Killed):
            run_federation(config, CLIENTS, run_id=run_id)
    else:
        kind = MessageType.EVALUATE if place == FINAL else MessageType.TRAIN
        with pytest.raises(Killed):
            run_federation(config, CLIENTS, on_message(kind, number), run_id=run_id)


# -- something happens to a client ---------------------------------------------------------------


def on_round(number: int, node: int, change: Any) -> Tamper:
    """Replace one client's training reply of one round by ``change(message, reply)``."""
    return when(change, MessageType.TRAIN, node, number)


def meanwhile(event: Callable[[], object]) -> Change:
    """Let something happen before the honest reply arrives."""

    def change(message: Message, reply: Message) -> Message:
        event()
        return reply

    return change


def a_round_late(
    grids: list[LocalGrid], rounds: str, asks: str = MessageType.TRAIN, node: int = 1001
) -> Tamper:
    """Let a node's reply in these rounds arrive while the next round waits for another client.

    ``rounds``: their digits, so ``"13"`` is rounds 1 and 3. ``grids`` has the grid of the run once
    it has started. ``asks`` is the kind of the next round's message at which the reply arrives.
    """
    held: list[Message] = []

    def tamper(message: Message, reply: Message) -> Message | None:
        facts = message.metadata
        is_slow = facts.message_type == MessageType.TRAIN and facts.dst_node_id == node
        if is_slow and facts.group_id in rounds:
            held.append(reply)
            return None
        is_next_round = held and held[0].metadata.group_id != facts.group_id
        if facts.message_type == asks and is_next_round:
            late = held.pop()
            grids[0]._ready[late.metadata.reply_to_message_id] = late
        return reply

    return tamper


fails = failing(0, "actor died")


def flip_a_bit(path: Path, bit: int) -> None:
    """Flip a bit of a file, as a bad disk does; a negative number is counted from the end."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
