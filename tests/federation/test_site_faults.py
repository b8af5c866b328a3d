"""What is wrong at one of three sites with data of their own.

Both sides name it, and the other two go on.
"""

import errno
import os
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from flwr.app import Error, Message, MessageType
from flwr.common.constant import ErrorCode
from PIL import Image

from protofl_common.experiment.settings import digest_of
from server_app.network.membership import FederationError
from tests.support.accidents import meanwhile, on_round
from tests.support.attacks import by, card_with, empty, failing, lost, when
from tests.support.given import Patch
from tests.support.sites import NAMES, SOUTH, Three

STAMP = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S*"


@pytest.fixture
def three(tmp_path):
    return Three(tmp_path)


# -- a site that is left out ---------------------------------------------------------------------


def misspell(three, patch):
    (three.south / "data/malignant").rename(three.south / "data/malingant")


def name_the_misspelt(three, patch):
    """South's operator misspells the folder and the class in the node config alike."""
    misspell(three, patch)
    three.nodes[SOUTH]["classes"] = "benign,malingant"


def truncate(three, patch):
    file = three.south / "data/benign/0.png"
    file.write_bytes(file.read_bytes()[:60])


def move_the_data(three, patch):
    (three.south / "data").rename(three.south / "moved")


def put_a_file_in_place_of_the_state(three, patch):
    (three.south / "state").write_text("not even root writes below a file")


def fill_the_disk(three, patch):
    """Let the disk be full for every file of south that must reach it, its audit log first."""
    sync = os.fsync

    def full(descriptor):
        if "south" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    patch.setattr("client_app.site.audit.os.fsync", full)


def fill_the_cache(three, patch):
    """Let south have no room for arrays of decoded images."""
    save = np.save

    def full(file, array):
        if "south" in str(file):
            raise OSError(errno.ENOSPC, "No space left on device")
        save(file, array)

    patch.setattr("numpy.save", full)


@dataclass(frozen=True)
class Fault:
    strike: Callable[[Three, Patch], None]
    server_says: str
    """A pattern of what the server prints."""
    site_says: str
    """A pattern of what stands in south's log."""


LEFT_OUT = {
    "misspelt class, named so by its operator": Fault(
        name_the_misspelt,
        r"south: the sites differ in classes; .*\n +benign, mali.*: east, north\n.*: south",
        "query 0: sent site, 0 bytes of arrays; its classes: benign, malingant\n",
    ),
    "misspelt class": Fault(
        misspell,
        r"south cannot take part: DataError \(classes\): ",
        "does not list the folder 'malingant'",
    ),
    "truncated image": Fault(
        truncate,
        "south cannot take part: DataError: its data cannot be read",
        "benign/0.png is not a readable image",
    ),
    "no data": Fault(
        move_the_data,
        r"south cannot take part: DataError \(data-dir\)",
        "there is no such folder",
    ),
    "unwritable folder": Fault(
        put_a_file_in_place_of_the_state,
        r"south cannot take part: AuditError \(state-dir\): its audit log cannot be written",
        "cannot be written",
    ),
    "full disk": Fault(
        fill_the_disk,
        r"south cannot take part: AuditError \(state-dir\)",
        "south/state/.* cannot be written .*No space left on device",
    ),
    "full disk of the cache": Fault(
        fill_the_cache,
        r"south cannot take part: DataError \(cache-dir\)",
        "cannot be written .*No space left on device.*; set cache-dir to a folder with room",
    ),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_faulty_site_is_named_and_left_out(name, three, monkeypatch, capfd):
    """South has the fault; server and site say so, and east and north go on."""
    fault = LEFT_OUT[name]
    fault.strike(three, monkeypatch)

    outcome = three.run()

    said = capfd.readouterr()
    assert set(outcome.summary["clients"]) == {"east", "north"}
    assert re.search(fault.server_says, said.out), said.out
    assert "going on with 2 of 3 clients (min-clients)" in said.out
    assert re.search(fault.site_says, said.err), said.err


# -- a site that is not --------------------------------------------------------------------------


def test_a_site_that_dies_over_its_introduction_or_loses_it_is_asked_again(three):
    """South fails twice in its introduction, each time in another way, and then takes part."""
    deaths = [ErrorCode.NODE_UNAVAILABLE, ErrorCode.MESSAGE_UNAVAILABLE]

    def dies_twice(message, reply):
        if not deaths:
            return reply
        return Message(Error(deaths.pop(), "unavailable"), reply_to=message)

    outcome = three.run(when(dies_twice, MessageType.QUERY, node=SOUTH), min_clients=3)

    assert set(outcome.summary["clients"]) == set(NAMES)


def test_images_of_another_size_are_no_fault(three):
    """South's images of 13×21 pixels are resized to the run's image-size."""
    for file in (three.south / "data").rglob("*.png"):
        Image.open(file).resize((13, 21)).save(file)

    outcome = three.run(min_clients=3)

    assert set(outcome.summary["clients"]) == set(NAMES)


def test_a_site_says_that_it_has_lost_its_model(three, capfd):
    """South's models are removed once it has answered round 1: its log warns of it in round 2."""

    def lose_models():
        for model in (three.south / "state").rglob("*-*.safetensors"):
            model.unlink()

    three.run(on_round(number=1, node=SOUTH, change=meanwhile(lose_models)), rounds=2)

    line = r"WARNING protofl: run \d+: no model of an earlier round in state-dir"
    assert len(re.findall(line, capfd.readouterr().err)) == 1


def test_a_site_says_that_its_model_is_older_than_the_one_that_counted(three, capfd):
    """South loses its model of round 2 once the server has its reply, and goes on from round 1's.

    All its replies are valid.
    """

    def lose_newest_model(_, reply):
        max((three.south / "state").rglob("*-*.safetensors")).unlink()
        return reply

    outcome = three.run(on_round(number=2, node=SOUTH, change=lose_newest_model), rounds=3)
    assert outcome.per_row("valid") == [3, 3, 3, 3]

    said = "the newest model in state-dir is of round 1, older than round 2, the last that counted"
    assert capfd.readouterr().err.count(said) == 1


def test_a_site_that_hangs_costs_no_whole_timeout(three, capfd):
    """South answers nothing in round 2: the server waits less than round-timeout.

    It knows how long sites take from round 1, in which every site has the whole time.
    """
    outcome = three.run(
        on_round(number=2, node=SOUTH, change=lost), rounds=3, round_timeout=100.0, min_wait=0.0
    )

    assert outcome.per_row("missing") == [[], ["south"], [], []]

    said = re.search(r"missing: south: no answer in (\d+) s", capfd.readouterr().out)
    assert said
    assert float(said[1]) < 100


# -- logs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [MessageType.TRAIN, MessageType.EVALUATE])
def test_a_run_without_a_valid_reply_has_not_completed_and_its_log_says_why(kind, three):
    """All replies to training, or to the final evaluation, are empty: there is no summary."""
    line = r"no client has sent one valid reply|no valid reply to the final"
    with pytest.raises(FederationError, match=line):
        three.run(when(empty, kind), run_name="mine")

    folder = three.folder / "runs/mine"
    assert not (folder / "summary.json").exists()

    *_, last = (folder / "run.log").read_text().splitlines()
    ended = rf"{STAMP} ERROR ended by FederationError: no (client has sent one )?valid reply"

    assert re.match(ended, last)


def test_logs_say_what_has_left_a_site_and_what_a_run_says_with_time_and_level(three, capfd):
    """Each line has time and level, at the server and at each of three sites.

    South's reply of round 1 is lost after it has left.
    """
    outcome = three.run(
        on_round(number=1, node=SOUTH, change=failing(2, "it rains")), run_name="mine"
    )

    log = (outcome.folder / "run.log").read_text()
    assert re.search(rf"(?m)^{STAMP} WARNING failed: south: it rains$", log)
    assert re.search(rf"(?m)^{STAMP} INFO round 1/1 ", log)

    said = capfd.readouterr().err
    number = outcome.grid.run_id
    settings = digest_of(outcome.grid.run_config)
    sent = outcome.rows[0]["bytes"]["up"] // 2  # of the two whose reply arrives
    run = rf"{STAMP} INFO protofl: run ({number}|mine \({number}\)), settings {settings}, fedproto"

    for line in (
        "query 0: sent site, 0 bytes of arrays; its classes: benign, malignant",
        f"train 1: sent prototypes, report, {sent:,} bytes of arrays",
        "evaluate 1: sent report, 0 bytes of arrays",
    ):
        assert len(re.findall(rf"(?m)^{run}, {line}$", said)) == 3, line


def test_a_site_that_claims_another_task_is_left_out(three):
    """Its introduction alone must not end the run of the others."""
    lie = by({SOUTH: card_with(task_kind="multi-label")}, MessageType.QUERY)
    outcome = three.run(tamper=lie)

    assert set(outcome.summary["clients"]) == {"east", "north"}
