"""What would go on for ever fails instead."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def computes_at_most(seconds: float, what: str) -> Iterator[None]:
    """KeyboardInterrupt that says ``what`` hangs if the block computes for more CPU seconds."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt(what)

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
