"""While a site runs: look, once an hour, for what its operator should hear (``on-trouble``)."""

import argparse
import threading
import time

from client_app.site.hooks import tell_of_trouble
from client_app.site.log import log
from protofl_common.tools.site.check import troubles

LOOK_SECONDS = 3600.0


class Watch(threading.Thread):
    """Calls the operator's ``on-trouble`` command for each trouble, as long as the site runs."""

    def __init__(self, options: argparse.Namespace) -> None:
        """``options``: those of ``protofl site run``, with the ``node`` config."""
        super().__init__(daemon=True)
        self.options = options

    def run(self) -> None:
        """Look once an hour; an error is logged, and ends nothing."""
        while True:
            try:
                self.look()
            except Exception as error:  # the site must go on
                log("ERROR", f"on-trouble: {error}")
            time.sleep(LOOK_SECONDS)

    def look(self) -> None:
        """Call the operator's command with a word for each thing that will stop the site."""
        for word in troubles(self.options, self.options.node):
            tell_of_trouble(self.options.node, word)
