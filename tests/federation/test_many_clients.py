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
from tests.support.harness import run_config, run_federation

SMALL: dict[str, Any] = {"dataset": "digits", "partition": "iid", "train_samples": 10, "test_samples": 10}


def test_the_server_remembers_no_figures_of_single_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("server_app.app.ActiveRun", lambda *args: seen.append(ActiveRun(*args)) or seen[0])  # type: ignore[func-returns-value]
    outcome = run_federation(run_config(tmp_path, rounds=3, **SMALL), clients=3)
    assert len(seen[0].rows) == 4
    assert all(row["clients"] == {} for row in seen[0].rows)
    assert all(len(row["clients"]) == 3 for row in outcome.rows)


def test_the_final_evaluation_asks_a_thousand_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = run_federation(run_config(tmp_path / "at-once", rounds=1, **SMALL), clients=3).rows[-1]
    monkeypatch.setattr(rounds, "AT_ONCE", 2)
    asked, make = [], rounds._contents
    monkeypatch.setattr(rounds, "_contents", lambda *args: asked.append([*args[1]]) or make(*args))  # type: ignore[func-returns-value]
    found = run_federation(run_config(tmp_path / "in-turn", rounds=1, **SMALL), clients=3).rows[-1]
    assert asked == [["site-0", "site-1", "site-2"], ["site-0", "site-1"], ["site-2"]]
    assert found["accuracy"] == wanted["accuracy"]
    assert (found["asked"], found["valid"], found["bytes"]) == (3, 3, wanted["bytes"])


def test_introductions_are_asked_for_a_thousand_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "AT_ONCE", 2)
    sent, push = [], membership.push_each

    def pushed(grid: Any, messages: Any) -> Any:
        sent.append(found := push(grid, messages))
        return found

    monkeypatch.setattr(membership, "push_each", pushed)
    outcome = run_federation(run_config(tmp_path, rounds=1, **SMALL), clients=5)
    assert [len(one) for one in sent] == [2, 2, 1]
    assert len(outcome.summary["clients"]) == 5


def test_prototypes_of_many_clients_are_not_written_each_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = run_federation(run_config(tmp_path / "few", rounds=3, **SMALL), clients=3)
    write, written = artifacts._write_owned, []
    monkeypatch.setattr(artifacts, "_write_owned", lambda *args: (written.append(args[3]), write(*args)))
    monkeypatch.setattr(artifacts, "FEW", 0)
    monkeypatch.setattr(artifacts, "EVERY", 2)
    found = run_federation(run_config(tmp_path / "many", rounds=3, **SMALL), clients=3)
    assert written == [2, 3]
    (one, facts), (other, others) = (
        read_tensors(run.folder / "client-prototypes.safetensors", torch.device("cpu")) for run in (found, wanted)
    )
    assert facts == others
    assert all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())


def test_introductions_build_a_model_of_each_kind_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cards(folder: str) -> list[Any]:
        outcome = run_federation(run_config(tmp_path / folder, algo="fedavg", rounds=1, models="cnn4", **SMALL), 4)
        return [
            reply.content["site"] for message, reply in outcome.grid.log if message.metadata.message_type == "query"
        ]

    check, checked = introduction.check_model, []
    monkeypatch.setattr(introduction, "check_model", lambda *args: (checked.append(args[1]), check(*args)))
    monkeypatch.setattr(introduction, "_KNOWN_MODELS", {})
    found = cards("once")
    assert checked == ["cnn4"]
    monkeypatch.setattr(introduction, "_KNOWN_MODELS", type("Never", (dict,), {"__contains__": lambda *_: False})())
    assert cards("each") == found
    assert len(checked) == 5


def test_what_one_site_says_of_itself_does_not_flood_the_servers_log() -> None:
    said = {"north": "a, b", "south": ", ".join(map(str, range(100_000)))}
    with pytest.raises(FederationError) as error:
        must_agree("classes", said, str, "set `classes`")
    assert "north" in str(error.value)
    assert len(str(error.value)) < 2000
