"""The lines of a run: on the screen, which `flwr run --stream` carries, and in ``run.log``."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from protofl_common.runs.folder import TROUBLE

ALARMING = (*TROUBLE, "void", "warning", "waiting")
"""Lines that begin so have the level WARNING in a run's log."""
SILENCE_SECONDS = 2.0
"""Seconds that the SuperLink may take to say that there is nothing new, without a line on it."""

# No child of the root logger, whose handlers would print all lines again
_LOG = logging.Logger("protofl", logging.INFO)
_LOG.addHandler(logging.NullHandler())


def say(text: str) -> None:
    """Print a line at once and, while a run is `logged`, write it into its log too."""
    print(text, flush=True)
    is_alarming = text.lstrip().startswith(ALARMING)
    _LOG.log(logging.WARNING if is_alarming else logging.INFO, text.strip())


def tell_silence(since: float) -> None:
    """Say that the SuperLink took long over a call; Flower itself waits and tries again."""
    silence = time.monotonic() - since
    if silence > SILENCE_SECONDS:
        say(f"  the SuperLink did not answer for {silence:.0f} s; going on")


@contextmanager
def logged(file: Path) -> Iterator[None]:
    """Meanwhile, add all lines to ``file`` with time and level, and the error that ends it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(file, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    _LOG.addHandler(handler)
    try:
        yield
    except BaseException as error:
        _LOG.error("ended by %s: %s", type(error).__name__, error)
        raise
    finally:
        _LOG.removeHandler(handler)
        handler.close()
