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
    """Run the program of the node config's ``on-request`` with the id of a study."""
    _start(ON_REQUEST, str(node.get(ON_REQUEST, "")), study)


def tell_of_trouble(node: Values, word: str) -> None:
    """Run the program of the node config's ``on-trouble``, once a day for each ``word``.

    The word is `REFUSED`, `DISK` or `CERTIFICATE`.
    """
    command = str(node.get(ON_TROUBLE, ""))
    if not command:
        return
    today = date.today().isoformat()
    try:
        with record_in(site_folder(node) / FILE, "of what its operator was told") as days:
            was_told = days.get(word) == today
            days[word] = today
    except StateError as error:  # the disk may be full, which is what the operator must be told
        log("ERROR", str(error))
        # not of a refusal: each message of a server could start the program once more
        was_told = word == REFUSED
    if not was_told:
        _start(ON_TROUBLE, command, word)


def _start(key: str, command: str, word: str) -> None:
    """Run the operator's program ``command`` with one argument, without a shell, and wait for it.

    ``key`` is the setting that names it. Failure is logged and changes nothing else.
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
