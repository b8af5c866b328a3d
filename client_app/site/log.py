"""The log that a site's operator reads, and the error of which it alone tells."""

import sys
from datetime import datetime
from functools import cache

from protofl_common.basics.text import LONGEST_IN_LOG, printable


class UntoldError(Exception):
    """An error that a site answers like one that nobody expects.

    Which it was would tell of its data.
    """


def log(level: str, text: str) -> None:
    """Print one line with its time on standard error, whatever ``text`` has.

    Settings must not write lines of their own.
    """
    now = datetime.now().astimezone()
    line = f"{now:%Y-%m-%dT%H:%M:%S%z} {level} protofl: {printable(text, LONGEST_IN_LOG)}"
    print(line, file=sys.stderr, flush=True)


log_once = cache(log)  # in a simulation hundreds of clients fail for one reason
