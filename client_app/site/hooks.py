"""The operator's own programs, which are started when a request waits or something is wrong."""

import subprocess
from datetime import date

from client_app.site.log import log
from client_app.site.record import StateError, record_in
from protofl_common.config.options import Values
from protofl_common.experiment.node import ON_REQUEST, ON_TROUBLE, site_folder

HOOK_SECONDS = 10  # in which a program must have ended
FILE = "told.json"
REFUSED = "refused"
DISK = "disk"
CERTIFICATE = "certificate"


def tell_of_request(node: Values, study: str) -> None:
    """Start the program of ``on-request`` with the id of a request."""
    _start(ON_REQUEST, str(node.get(ON_REQUEST, "")), study)


def tell_of_trouble(node: Values, word: str) -> None:
    """Start the program of ``on-trouble`` with one of the words above, once a day for each."""
    command = str(node.get(ON_TROUBLE, ""))
    if not command:
        return
    today = date.today().isoformat()
    try:
        with record_in(site_folder(node) / FILE, "of what its operator was told") as days:
            was_told = days.get(word) == today
            days[word] = today
    except StateError as error:  # a full disk is what it may have to tell
        log("ERROR", str(error))
        was_told = word == REFUSED  # perhaps: a server could start a program with each message
    if not was_told:
        _start(ON_TROUBLE, command, word)


def _start(key: str, command: str, word: str) -> None:
    """Start a program of the operator's with one argument.

    No shell reads it. What goes wrong is logged, and the site does what it does without it.
    """
    if not command:
        return
    try:
        subprocess.run(
            [command, word],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=HOOK_SECONDS,
            check=True,
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        log("ERROR", f"{key} = {command!r}: {error}")
