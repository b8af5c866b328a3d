"""Links that are slow, far away or broken, between a site and the SuperLink."""

import time
from contextlib import ExitStack
from functools import partial

import pytest

from tests.support.processes import free_port, repeated
from tests.support.relay import Relay
from tests.support.standing import Standing

pytestmark = [pytest.mark.system, pytest.mark.long]
MBIT = 125_000.0
"""Bytes per second."""
DOOR = 5.0
"""Seconds without a word, after which a door closes a connection."""


class Sites(Standing):
    """A federation whose sites reach the SuperLink by lines of their own."""

    def __init__(self, folder, running):
        super().__init__(folder, running)
        self.relays = {}

    def begin(self, lines, **config):
        """Start everything, and a run that waits for all sites.

        ``lines``: site -> how its line to the SuperLink is, by the arguments of `Relay`.
        """
        self.start_superlink()
        self.start_worker()
        for number, (site, line) in enumerate(lines.items()):
            relay = Relay(self.port, free_port(), **line)
            self.relays[site] = self.running.enter_context(relay)
            program = "protofl site run"
            self.start_site(site, number, len(lines), program=program, port=relay.port)
        waiting = {"num-clients": len(lines), "join-timeout": 600, "run-name": "links"}
        self.submit({**waiting, **config})

    def finish(self, timeout):
        """Wait until the run has completed, and return its rows."""
        assert self.wait_for_end(timeout) == "finished:completed", self.logs()
        return self.rows("links")


@pytest.fixture
def sites(tmp_path):
    with ExitStack() as running:
        yield Sites(tmp_path, running)


def test_no_reply_is_lost_on_bad_links(sites):
    """Five sites: far away, on a narrow line, cut off every two seconds, without a line, and slow.

    The slow one is stopped for three times as long as its door waits for a word of it, and the
    cable of another is out meanwhile.
    """
    lines = {
        "unplugged": {},
        "far": {"delay": 0.2},
        "narrow": {"rate": MBIT},
        "broken": {},
        "patient": {"idle": DOOR},
    }
    sites.begin(lines, algo="fedavg", rounds=3)
    with repeated(sites.relays["broken"].cut, seconds=2.0):
        sites.wait_for_rounds("links", 1)
        client = sites.wait_for_client("patient")
        client.suspend()
        sites.relays["unplugged"].held = True
        time.sleep(3 * DOOR)
        sites.relays["unplugged"].held = False
        client.resume()
        rows = sites.finish(timeout=600)

    # three rounds and the final evaluation
    assert [row["valid"] for row in rows] == [5, 5, 5, 5], sites.printed()
    assert sites.relays["broken"].cuts > 5
    training = rows[1]["seconds"]["total"]
    assert training > 2 * DOOR


def test_prototypes_of_a_large_network_pass_a_line_of_64_kbit(sites):
    """The network's weights would take an hour and a half each way."""
    lines = {"north": {}, "south": {"rate": 0.064 * MBIT}}
    sites.begin(lines, algo="fedproto", rounds=2, models="resnet18")
    rows = sites.finish(timeout=1200)

    # two rounds and the final evaluation, each of two sites
    assert [row["valid"] for row in rows] == [2, 2, 2], sites.printed()


def test_a_reply_in_mid_push_outlives_the_superlink(sites):
    """The SuperLink is killed when south has sent a part of its reply of round 2, and comes back.

    South's line is narrow meanwhile, so that there is time to kill it.
    """
    sites.begin({"north": {}, "south": {}}, algo="fedavg", rounds=3)
    relay = sites.relays["south"]
    sites.wait_for_rounds("links", 1)
    relay.rate = MBIT
    sites.wait_for_upload("links", "south", 2)
    sites.wait(partial(relay.has_sent, relay.bytes_up + MBIT))  # for about a second
    sites.kill("superlink")
    sites.start_superlink()
    rows = sites.finish(timeout=600)

    assert [row["valid"] for row in rows] == [2, 2, 2, 2], sites.printed()
