"""TensorBoard's event files hold the figures of ``metrics.jsonl``, each once."""

import sys
from pathlib import Path
from typing import Any

import pytest

from protofl_common.config.options import SettingsError
from tests.support.accidents import stop
from tests.support.harness import Outcome, run_config, run_federation

SMALL: dict[str, Any] = {"dataset": "digits", "partition": "iid", "train_samples": 20, "test_samples": 20}
SMALL |= {"algo": "fedtgp", "rounds": 3, "run_name": "mine", "callback": "tensorboard", "fedtgp__server_epochs": 2}


def scalars(outcome: Outcome) -> dict[str, dict[int, float]]:
    """Tag -> step -> value; a step that stands there twice fails."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reader = accumulator.EventAccumulator(str(outcome.folder / "tensorboard"), {"scalars": 0})
    reader.Reload()
    found = {}
    for tag in reader.Tags()["scalars"]:
        events = reader.Scalars(tag)
        found[tag] = {event.step: event.value for event in events}
        assert len(found[tag]) == len(events), tag
    return found


def assert_complete(outcome: Outcome) -> None:
    found = scalars(outcome)
    for kind in ("head", "prototype"):
        for name, tag in (("mean", "mean"), ("worst-10%", "worst-10-percent"), ("std", "std")):
            rows = [row for row in outcome.rows if kind in row["accuracy"]]
            wanted = {row["evaluated-after-round"]: row["accuracy"][kind][name] for row in rows}
            assert found[f"accuracy/{kind}/{tag}"] == pytest.approx(wanted)
    rounds = outcome.rows[:-1]
    for tag, value in {
        "loss/total": lambda row: row["losses"]["total"],
        "bytes/up": lambda row: row["bytes"]["up"],
        "seconds/total": lambda row: row["seconds"]["total"],
        "replies/refused": lambda row: len(row["refused"]),
        "replies/valid": lambda row: row["valid"],
        "server/margin": lambda row: row["server"]["margin"],
    }.items():
        assert found[tag] == pytest.approx({row["round"]: value(row) for row in rounds}), tag


def test_the_metrics_are_there_under_their_rounds(tmp_path: Path) -> None:
    assert_complete(run_federation(run_config(tmp_path, **SMALL), 3))


def test_a_resumed_run_has_each_round_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    config = run_config(tmp_path, **SMALL)
    stop(config, "before the checkpoint", 2)
    assert_complete(run_federation(config | {"resume": True}, 4, run_id=7))


def test_without_the_package_the_run_ends_before_any_client_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    asked: list[Any] = []
    with pytest.raises(SettingsError, match=r"callback = 'tensorboard': .* pip install 'protofl\[tensorboard\]'"):
        run_federation(run_config(tmp_path, **SMALL), 2, on_grid=lambda grid: asked.append(grid))
    assert not asked[0].log


def test_without_the_setting_nothing_is_written(tmp_path: Path) -> None:
    assert not (run_federation(run_config(tmp_path, **SMALL | {"callback": ""}), 2).folder / "tensorboard").exists()
