"""The lines of a run: on the screen, which `flwr run --stream` carries, and in ``run.log``."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from protofl_common.runs.folder import TROUBLE

ALARMING = (*TROUBLE, "void", "warning", "waiting")  # Lines that begin so have the level WARNING in a run's log
SILENCE = 2.0  # Seconds that the SuperLink may take to say that there is nothing new, before it is worth a line
_LOG = logging.Logger("protofl", logging.INFO)  # no child of the root's, whose handlers would print all again
_LOG.addHandler(logging.NullHandler())


def say(text: str) -> None:
    """A line, at once; while a run is `logged`, in its log too."""
    print(text, flush=True)
    _LOG.log(logging.WARNING if text.lstrip().startswith(ALARMING) else logging.INFO, text.strip())


def tell_silence(since: float) -> None:
    """A line if the SuperLink took long over a call; Flower itself waits and tries again."""
    if (silence := time.monotonic() - since) > SILENCE:
        say(f"  the SuperLink did not answer for {silence:.0f} s; going on")


@contextmanager
def logged(file: Path) -> Iterator[None]:
    """Add all lines meanwhile to ``file`` with time and level, and the error that ends it."""
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
