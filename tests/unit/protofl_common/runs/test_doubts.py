"""What looks odd in a run is said in a line: in its data before the first round, in its outcome at the end."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_app.algorithms.fedavg import FedAvg
from tests.support.harness import run_config, run_federation


def written(tmp_path: Path, labels: list[str], **more: Any) -> dict[str, Any]:
    """The config of a run over these labels, whose inputs say nothing about them."""
    inputs = np.random.default_rng(1).normal(size=(len(labels), 3))
    np.savez(tmp_path / "mine.npz", inputs=inputs, labels=labels, **more)
    own = {"dataset": "arrays", "data_dir": str(tmp_path / "mine.npz"), "partition": "iid", "models": "mlp-1"}
    return run_config(tmp_path, **own, algo="fedavg", train_samples=0, test_samples=0, lr=1e-9)


def test_an_accuracy_that_needs_no_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    outcome = run_federation(written(tmp_path, (["no"] * 9 + ["yes"]) * 8), clients=2)
    guess = outcome.summary["accuracy"]["head"]["mean"]
    assert guess <= 0.9
    (doubt,) = outcome.summary["warnings"]
    naming = "always naming each client's most frequent class is right for 90.0 %"
    assert doubt == f"accuracy by head is {100 * guess:.1f} %, no better than a guess: {naming}"
    assert f"warning: {doubt}" in capfd.readouterr().out


def test_a_model_that_has_learnt_raises_no_doubt(tmp_path: Path) -> None:
    labels = ["no", "yes"] * 60
    config = written(tmp_path, labels)
    inputs = np.random.default_rng(1).normal(size=(120, 3)) + 6.0 * np.array([[0], [1]] * 60)
    np.savez(tmp_path / "mine.npz", inputs=inputs, labels=labels)
    assert run_federation(config | {"lr": 0.1, "rounds": 3}, clients=2).summary["warnings"] == []


def test_a_class_that_is_tested_nowhere(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_federation(written(tmp_path, ["a", "b"] * 20 + ["rare"]), clients=2)
    assert "warning: trained on, but tested nowhere: rare\n" in capfd.readouterr().out


def test_rounds_that_changed_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def tamper(message: Any, reply: Any) -> Any:
        return None if message.metadata.message_type == "train" and message.metadata.group_id == "2" else reply

    config = written(tmp_path, ["a", "b"] * 20) | {"round-timeout": 0.5, "max-silent-rounds": 0}
    first, *_ = run_federation(config, clients=2, tamper=tamper).summary["warnings"]
    assert first.startswith("1 of 2 rounds changed nothing, the last one among them: "), first


def test_a_method_that_breaks_at_some_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = FedAvg.fit

    def broken(self: FedAvg[Any]) -> dict[str, float]:
        if self.client.name == "site-1":
            raise AttributeError("'Batch' object has no attribute 'label'")
        return honest(self)

    monkeypatch.setattr(FedAvg, "fit", broken)
    config = written(tmp_path, ["no", "yes"] * 60)
    (doubt, *_) = run_federation(config | {"rounds": 2, "min-replies": 1}, clients=2).summary["warnings"]
    assert doubt.startswith("2 of 6 replies failed, the last: ")
    assert "AttributeError" in doubt
