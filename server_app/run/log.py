"""The listeners of a run's events: the caller of `federate`, and the file ``run.log``."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

from protofl_common.runs.events import Event, OnEvent, Said

SILENCE_SECONDS = 2.0
"""Seconds that the SuperLink may take to say that there is nothing new, without a line on it."""

_listeners: list[OnEvent] = []


@contextmanager
def listening(on_event: OnEvent) -> Iterator[None]:
    """Within the ``with`` block, hand each event to ``on_event`` as well."""
    _listeners.append(on_event)
    try:
        yield
    finally:
        _listeners.pop()


def emit(event: Event) -> None:
    """Hand a copy of an event to each listener, at once: the run is safe from what one changes.

    The caller's comes last, as it may raise an error.
    """
    for on_event in reversed(_listeners):
        on_event(deepcopy(event))


def say(text: str) -> None:
    emit(Said(text))


def tell_silence(since: float) -> None:
    """Say so if the SuperLink took long to answer a call that began at ``since``.

    The time is of the monotonic clock. Flower itself waits and tries again, without a word.
    """
    silence = time.monotonic() - since
    if silence > SILENCE_SECONDS:
        say(f"  the SuperLink did not answer for {silence:.0f} s; going on")


@contextmanager
def logged(file: Path) -> Iterator[None]:
    """Within the ``with`` block, append all events to ``file``, with time and level.

    An error that ends the block is logged and raised again.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(file, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log = logging.Logger("protofl")  # no child of the root logger, which would print all again
    log.addHandler(handler)

    def write(event: Event) -> None:
        log.log(logging.WARNING if event.is_alarming else logging.INFO, str(event).strip())

    try:
        with listening(write):
            yield
    except BaseException as error:
        log.error("ended by %s: %s", type(error).__name__, error)
        raise
    finally:
        handler.close()
