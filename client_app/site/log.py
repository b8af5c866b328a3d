"""The log that a site's operator reads, and an error whose text only this log has."""

import sys
from datetime import datetime
from functools import cache

from protofl_common.basics.text import LONGEST_IN_LOG, printable


class UntoldError(Exception):
    """An error that the server learns of as "an unexpected error", as its text tells of the data.

    Only the site's own log has the text.
    """


def log(level: str, text: str) -> None:
    """Print one line with its time on standard error.

    Line breaks in ``text`` are replaced: it may quote settings, which must not forge lines here.
    """
    now = datetime.now().astimezone()
    line = f"{now:%Y-%m-%dT%H:%M:%S%z} {level} protofl: {printable(text, LONGEST_IN_LOG)}"
    print(line, file=sys.stderr, flush=True)


log_once = cache(log)  # in a simulation hundreds of clients fail for one reason
