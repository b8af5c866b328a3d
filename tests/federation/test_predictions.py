"""``protofl predict RUN``: what a run's models say of the clients' test samples."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from protofl_common.data import open_client_data
from protofl_common.experiment.settings import Settings
from protofl_common.tools.cli import main
from tests.support.fakes import write_run
from tests.support.harness import run_config, run_federation


@pytest.mark.parametrize("algo", ["fedproto", "fedavg", "fedpcl"])
def test_every_test_sample_has_a_row_and_the_rows_the_accuracy_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], algo: str
) -> None:
    config = run_config(tmp_path, algo=algo, models="cnn4", test_samples=50)
    run = run_federation(config, 3)
    capsys.readouterr()
    assert main(["predict", str(run.folder), "--json"]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    assert json.loads(told.out) == {
        "command": "predict",
        "format": 1,
        "file": str(run.folder / "predictions.csv"),
        "rows": 150,
        "clients": ["site-0", "site-1", "site-2"],
    }
    rows = list(csv.DictReader((run.folder / "predictions.csv").open(encoding="utf-8")))
    assert len(rows) == 150
    settings = Settings.from_run_config(config)
    for number in range(3):
        own = [row for row in rows if row["client"] == f"site-{number}"]
        data = open_client_data(settings.data, seed=settings.run.seed, partition=number, num_partitions=3)
        assert [int(row["label"]) for row in own] == data.test_labels.tolist()
        for way, accuracy in run.summary["accuracy-of-clients"][f"site-{number}"].items():
            assert np.mean([row[way] == row["label"] for row in own]) == accuracy
            scores = [[float(row[f"{way}-{label}"] or "-inf") for label in range(10)] for row in own]
            assert [str(np.argmax(one)) for one in scores] == [row[way] for row in own]


def test_data_that_changed_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_federation(run_config(tmp_path, models="cnn4", rounds=1), 2).folder
    settings = (run / "settings.toml").read_text()
    (run / "settings.toml").write_text(settings.replace("seed = 42", "seed = 43"))
    assert main(["predict", str(run)]) == 0
    assert "the data, or what computes, are not the same" in capsys.readouterr().err
    (run / "settings.toml").write_text(settings.replace("test-samples = 30", "test-samples = 7"))
    assert main(["predict", str(run)]) == 1
    assert "7 test samples, not" in capsys.readouterr().err


def test_a_run_without_models_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "one", {"algo": "local"}, [{"north": {"head": 0.5}}] * 2)
    assert main(["predict", str(tmp_path / "one")]) == 1
    assert "no trained models in it; they stayed with its sites, north" in capsys.readouterr().err
