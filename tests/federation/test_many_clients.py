"""What must not grow with the number of clients and rounds: memory, files written again, models built to be counted."""

from pathlib import Path
from typing import Any

import pytest
import torch

from client_app import introduction
from protofl_common.basics.tensorfile import read_tensors
from server_app import round as rounds
from server_app.callbacks import artifacts
from server_app.callbacks.base import ActiveRun
from server_app.network import membership
from server_app.network.admission import FederationError, must_agree
from tests.support.given import Patch
from tests.support.harness import run_config, run_federation
from tests.support.results import without_times

SMALL: dict[str, Any] = {
    "dataset": "digits",
    "partition": "iid",
    "train_samples": 10,
    "test_samples": 10,
}


def test_many_are_asked_in_turns_and_nothing_grows_with_them(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """Introductions and the final evaluation two at a time; prototypes of single clients in every other round."""
    wanted = run_federation(run_config(tmp_path / "few", rounds=3, **SMALL), clients=3)
    remembered, asked, introduced, written = [], [], [], []
    make, push, write = rounds._contents, membership.push_each, artifacts._write_owned

    def pushed(grid: Any, messages: Any) -> Any:
        introduced.append(ids := push(grid, messages))
        return ids

    for room, name, value in (
        (rounds, "AT_ONCE", 2),
        (membership, "AT_ONCE", 2),
        (artifacts, "FEW", 0),
    ):
        monkeypatch.setattr(room, name, value)
    monkeypatch.setattr(artifacts, "EVERY", 2)
    monkeypatch.setattr(
        "server_app.app.ActiveRun",
        lambda *args: remembered.append(ActiveRun(*args)) or remembered[0],
    )  # type: ignore[func-returns-value]
    monkeypatch.setattr(rounds, "_contents", lambda *args: asked.append([*args[1]]) or make(*args))  # type: ignore[func-returns-value]
    monkeypatch.setattr(membership, "push_each", pushed)
    monkeypatch.setattr(
        artifacts, "_write_owned", lambda *args: (written.append(args[3]), write(*args))
    )
    found = run_federation(run_config(tmp_path / "many", rounds=3, **SMALL), clients=3)
    assert [len(ids) for ids in introduced] == [2, 1]
    assert asked == 3 * [["site-0", "site-1", "site-2"]] + [["site-0", "site-1"], ["site-2"]]
    assert without_times(found.rows) == without_times(wanted.rows)
    assert [row["clients"] for row in remembered[0].rows] == 4 * [{}]
    assert [len(row["clients"]) for row in found.rows] == 4 * [3]
    assert written == [2, 3]
    (one, facts), (other, others) = (
        read_tensors(run.folder / "client-prototypes.safetensors", torch.device("cpu"))
        for run in (found, wanted)
    )
    assert facts == others
    assert all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())


def test_introductions_build_a_model_of_each_kind_once(tmp_path: Path, monkeypatch: Patch) -> None:
    def cards(folder: str) -> list[Any]:
        outcome = run_federation(
            run_config(tmp_path / folder, algo="fedavg", rounds=1, models="cnn4", **SMALL), 4
        )
        return [reply.content["site"] for _, reply in outcome.exchanged("query")]

    check, checked = introduction.check_model, []
    monkeypatch.setattr(
        introduction, "check_model", lambda *args: (checked.append(args[1]), check(*args))
    )
    monkeypatch.setattr(introduction, "_KNOWN_MODELS", {})
    found = cards("once")
    assert checked == ["cnn4"]
    monkeypatch.setattr(
        introduction, "_KNOWN_MODELS", type("Never", (dict,), {"__contains__": lambda *_: False})()
    )
    assert cards("each") == found
    assert len(checked) == 5


def test_what_one_site_says_of_itself_does_not_flood_the_servers_log() -> None:
    said = {"north": "a, b", "south": ", ".join(map(str, range(100_000)))}
    with pytest.raises(FederationError) as error:
        must_agree("classes", said, str, "set `classes`")
    assert "north" in str(error.value)
    assert len(str(error.value)) < 2000
