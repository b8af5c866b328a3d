"""Runs whose clients train at once (`clients-at-once`), beside the same without."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from client_app.learning import together
from client_app.site.log import log_once
from protofl_common.simulation.grid import simulate
from tests.support.given import Patch, Printed
from tests.support.harness import run_config
from tests.support.results import digests, without_times

CLIENTS = 5
TABLE = {
    "dataset": "breast-cancer",
    "image_size": 0,
    "partition": "dirichlet",
    "alpha": 1.0,
    "train_samples": 0,
    "test_samples": 0,
    "models": "mlp-1",
    "feature_dim": 8,
    "batch_size": 8,
    "rounds": 2,
    "local_epochs": 2,
}


def run(folder: Path, at_once: int, **changes: Any) -> Path:
    settings = {**TABLE, "run_name": "mine", "clients_at_once": at_once, **changes}
    return simulate(run_config(folder, **settings), CLIENTS, lambda event: None)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return without_times(rows)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    tensors = {}
    for path in sorted(folder.glob("clients/*/model.safetensors")):
        for name, value in load_file(path).items():
            tensors[f"{path.parent.name}/{name}"] = value
    return tensors


@pytest.fixture
def sizes_of_groups(monkeypatch: Patch) -> list[int]:
    """How many clients trained together, each time."""
    sizes: list[int] = []
    stacked = together.train_stacked

    def counting(trainings: Any) -> Any:
        sizes.append(len(trainings))
        return stacked(trainings)

    monkeypatch.setattr(together, "train_stacked", counting)
    return sizes


@pytest.mark.parametrize(
    ("algo", "models"), [("fedproto", "mlp-1"), ("fedrep", "mlp-1"), ("fedproto", "mlp-1, mlp-2")]
)
def test_models_are_the_same_up_to_rounding(
    algo: str, models: str, tmp_path: Path, sizes_of_groups: list[int]
) -> None:
    changes = {"algo": algo, "models": models, "keep_optimizer": True}
    alone = tensors_of(run(tmp_path / "alone", 1, **changes))
    assert sizes_of_groups == []
    at_once = tensors_of(run(tmp_path / "at-once", CLIENTS, **changes))
    assert sum(sizes_of_groups) % CLIENTS == 0
    assert sizes_of_groups
    assert alone
    assert alone.keys() == at_once.keys()
    for name, value in alone.items():
        torch.testing.assert_close(at_once[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"algo": "moon"}, "the method's loss depends on the single client"),
        ({"algo": "scaffold"}, "the method, or a protection, has steps of its own"),
        ({"algo": "fml"}, "the method's loss depends on the single client"),
        ({"dp": "sample", "dp_epsilon": 50.0}, "the method, or a protection, has steps of its own"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_cannot_be_stacked_trains_alone_to_the_bit(
    changes: dict[str, Any],
    reason: str,
    tmp_path: Path,
    sizes_of_groups: list[int],
    capsys: Printed,
) -> None:
    log_once.cache_clear()
    alone = run(tmp_path / "alone", 1, **changes)
    capsys.readouterr()
    at_once = run(tmp_path / "at-once", CLIENTS, **changes)
    assert sizes_of_groups == []
    assert capsys.readouterr().err.count(reason) == 1
    if "dp" not in changes:  # its noise has no seed
        assert rows_of(at_once) == rows_of(alone)
        assert digests(at_once) == digests(alone)


def test_who_breaks_down_says_so_in_the_same_words(tmp_path: Path) -> None:
    config = {"algo": "fedavg", "lr": 1e30, "rounds": 1}
    texts = []
    for at_once in (1, CLIENTS):
        with pytest.raises(Exception, match="no longer finite") as caught:
            run(tmp_path / str(at_once), at_once, **config)
        texts.append(str(caught.value).partition("; see")[0])
    assert texts[0] == texts[1]


def test_an_interrupted_cohort_leaves_no_thread(monkeypatch: Patch) -> None:
    def waiting() -> None:
        visit = together._VISIT.get()
        assert visit is not None
        visits.append(visit)
        visit.wait_for_others(SimpleNamespace())  # type: ignore[arg-type]

    def interrupt(visits: Any) -> None:
        raise KeyboardInterrupt

    visits: list[together.Visit[None]] = []
    monkeypatch.setattr(together, "_train_waiting", interrupt)
    with pytest.raises(KeyboardInterrupt):
        together.visit_together([waiting, waiting], say=print)
    assert len(visits) == 2
    for visit in visits:
        visit.join(60)
        assert not visit.is_alive()
