"""What is wrong at one of three sites with data of their own: both sides name it, and the other two go on."""

import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from PIL import Image

from protofl_common.experiment.settings import digest_of
from server_app.network.membership import FederationError
from tests.support.accidents import on_round
from tests.support.attacks import empty, lost, when
from tests.support.given import Patch, Printed
from tests.support.sites import NAMES, Three

STAMP = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S*"


@pytest.fixture
def three(tmp_path: Path) -> Three:
    return Three(tmp_path)


def misspell(three: Three, patch: Patch) -> None:
    (three.south / "data/malignant").rename(three.south / "data/malingant")


def name_the_misspelt(three: Three, patch: Patch) -> None:
    misspell(three, patch)
    three.nodes[3]["classes"] = "benign,malingant"


def truncate(three: Three, patch: Patch) -> None:
    file = three.south / "data/benign/0.png"
    file.write_bytes(file.read_bytes()[:60])


def fill_the_cache(three: Three, patch: Patch) -> None:
    save = np.save

    def full(file: Any, array: Any) -> None:
        if "south" in str(file):
            raise OSError(errno.ENOSPC, "No space left on device")
        save(file, array)

    patch.setattr("numpy.save", full)


def fill_the_disk(three: Three, patch: Patch) -> None:
    sync = os.fsync

    def full(descriptor: int) -> None:
        if "south" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    patch.setattr("client_app.audit.os.fsync", full)


LEFT_OUT: dict[str, tuple[Callable[[Three, Patch], Any], str, str]] = {
    "misspelt class, named so by its operator": (name_the_misspelt,
        r"south: the sites differ in classes; .*\n +benign, mali.*: east, north\n.*: south",
        "query 0: sent site, 0 bytes of arrays; its classes: benign, malingant\n"),
    "misspelt class": (misspell, r"south cannot take part: DataError \(classes\): ",
        "does not list the folder 'malingant'"),
    "truncated image": (truncate, "south cannot take part: DataError: its data cannot be read",
        "benign/0.png is not a readable image"),
    "no data": (lambda three, _: (three.south / "data").rename(three.south / "moved"),
        r"south cannot take part: DataError \(data-dir\)", "there is no such folder"),
    "unwritable folder": (lambda three, _: (three.south / "state").write_text("not even root writes below a file"),
        r"south cannot take part: AuditError \(state-dir\): its audit log cannot be written", "cannot be written"),
    "full disk": (fill_the_disk, r"south cannot take part: AuditError \(state-dir\)",
        "south/state/.* cannot be written .*No space left on device"),
    "full disk of the cache": (fill_the_cache, r"south cannot take part: DataError \(cache-dir\)",
        "cannot be written .*No space left on device.*; set cache-dir to a folder with room"),
}  # fmt: skip
"""What is done -> (how, what the server says, what the site's log says)."""


@pytest.mark.parametrize("fault", LEFT_OUT)
def test_a_faulty_site_is_named_and_left_out(
    fault: str, three: Three, monkeypatch: Patch, capfd: Printed
) -> None:
    strike, at_server, at_site = LEFT_OUT[fault]
    strike(three, monkeypatch)
    outcome = three.run()
    said = capfd.readouterr()
    assert set(outcome.summary["clients"]) == {"east", "north"}
    assert re.search(at_server, said.out), said.out
    assert "going on with 2 of 3 clients (min-clients)" in said.out
    assert re.search(at_site, said.err), said.err


def test_a_site_that_dies_over_its_introduction_or_loses_it_is_asked_again(three: Three) -> None:
    """Images of another size are no fault."""
    for file in (three.south / "data").rglob("*.png"):
        Image.open(file).resize((13, 21)).save(file)
    deaths = [
        Error(code, "unavailable")
        for code in (ErrorCode.NODE_UNAVAILABLE, ErrorCode.MESSAGE_UNAVAILABLE)
    ]

    def dies_once(message: Message, reply: Message) -> Message:
        return Message(deaths.pop(), reply_to=message) if deaths else reply

    assert set(
        three.run(when(dies_once, MessageType.QUERY, 3), min_clients=3).summary["clients"]
    ) == set(NAMES)


def test_a_site_with_another_version_is_named_and_left_out(three: Three, capfd: Printed) -> None:
    def older(message: Message, reply: Message) -> Message:
        card = {
            key: value
            for key, value in reply.content.config_records["site"].items()
            if key != "found"
        }
        return Message(RecordDict({"site": ConfigRecord(card)}), reply_to=message)

    assert set(three.run(when(older, MessageType.QUERY, 3)).summary["clients"]) == {"east", "north"}
    told = "south cannot take part: an introduction with no complete record 'site'; is the other side's ProtoFL of"
    assert told in capfd.readouterr().out


def test_a_site_says_that_it_has_lost_its_model(three: Three, capfd: Printed) -> None:
    three.run(
        on_round(1, 3, lambda _, reply: shutil.rmtree(three.south / "state") or reply), rounds=2
    )
    said = re.findall(
        r"WARNING protofl: run \d+: no model of an earlier round in state-dir",
        capfd.readouterr().err,
    )
    assert len(said) == 1


def test_a_site_says_that_its_model_is_older_than_the_one_that_counted(
    three: Three, capfd: Printed
) -> None:
    def older(_: Message, reply: Message) -> Message:
        max((three.south / "state").rglob("*-*.safetensors")).unlink()
        return reply

    outcome = three.run(on_round(2, 3, older), rounds=3)
    assert [row["valid"] for row in outcome.rows] == [3, 3, 3, 3]
    said = "the newest model in state-dir is of round 1, older than round 2, the last that counted"
    assert capfd.readouterr().err.count(said) == 1


@pytest.mark.parametrize("kind", [MessageType.TRAIN, MessageType.EVALUATE])
def test_a_run_without_a_valid_reply_has_not_completed_and_its_log_says_why(
    kind: str, three: Three
) -> None:
    with pytest.raises(
        FederationError, match=r"no client has sent one valid reply|no valid reply to the final"
    ):
        three.run(when(empty, kind), run_name="mine")
    assert not (three.folder / "runs/mine/summary.json").exists()
    last = (three.folder / "runs/mine/run.log").read_text().splitlines()[-1]
    assert re.match(
        rf"{STAMP} ERROR ended by FederationError: no (client has sent one )?valid reply", last
    )


def test_a_site_that_hangs_costs_no_whole_timeout(
    three: Three, monkeypatch: Patch, capfd: Printed
) -> None:
    """In a round after the first; in the first everybody has the whole timeout."""
    monkeypatch.setattr("server_app.network.exchange.LEAST_GRACE", 0.0)
    outcome = three.run(on_round(2, 3, lost), rounds=3, round_timeout=100.0)
    assert [row["missing"] for row in outcome.rows] == [[], ["south"], [], []]
    assert (
        float(re.search(r"missing: south: no answer in (\d+) s", capfd.readouterr().out)[1]) < 100
    )  # type: ignore[index]


def test_logs_say_what_has_left_a_site_and_what_a_run_says_with_time_and_level(
    three: Three, capfd: Printed
) -> None:
    fails = on_round(1, 3, lambda message, _: Message(Error(2, "it rains"), reply_to=message))
    outcome = three.run(fails, run_name="mine")
    lines = (outcome.folder / "run.log").read_text().splitlines()
    assert any(re.fullmatch(rf"{STAMP} WARNING failed: south: it rains", line) for line in lines)
    assert any(re.match(rf"{STAMP} INFO round 1/1 ", line) for line in lines)
    said = capfd.readouterr().err
    sent = outcome.rows[0]["bytes"]["up"] // 2  # of the two whose reply arrives
    number, settings = outcome.grid.run_id, digest_of(outcome.grid.run_config)
    run = rf"{STAMP} INFO protofl: run ({number}|mine \({number}\)), settings {settings}, fedproto"
    introduced = "query 0: sent site, 0 bytes of arrays; its classes: benign, malignant"
    trained = f"train 1: sent prototypes, report, {sent:,} bytes of arrays"
    for line in (introduced, trained, "evaluate 1: sent report, 0 bytes of arrays"):
        assert len(re.findall(rf"(?m)^{run}, {line}$", said)) == 3, line
