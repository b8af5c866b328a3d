"""``protofl predict`` on many files, some of which are broken, and on the test samples of a run."""

import csv
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from protofl_common.data import open_client_data
from protofl_common.experiment.settings import Settings
from protofl_common.runs.folder import WEIGHTS
from protofl_common.tools import reading
from protofl_common.tools.cli import main
from protofl_common.tools.inference import Predictor
from tests.support.given import Patch, Printed
from tests.support.harness import run_config, run_federation

LONG = "a-folder-with-quite-a-long-name" * 7
BROKEN: dict[str, bytes] = {"empty.png": b"", "text.jpg": b"no image", "header.png": b"\x89PNG\r\n\x1a\n",
    "zeros.bmp": bytes(100), "cut.gif": b"GIF89a\x01\x00\x01\x00", "wrong.tif": b"II*\x00\xff\xff\xff\xff",
    "wrong.webp": b"RIFF\x10\x00\x00\x00WEBPVP8 ", "negative.pgm": b"P5 -1 -1 255\n"}  # fmt: skip


def card_of(shape: tuple[int, ...]) -> Any:
    """What of a model's card reading needs."""
    return SimpleNamespace(input_shape=shape, input_type="uint8", columns=(), fill=())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = {"algo": "fedproto", "models": "cnn4", "dataset": "digits", "partition": "iid"}
    config = run_config(tmp_path_factory.mktemp("run"), train_samples=40, test_samples=40, **settings)
    return run_federation(config, 2).folder


@pytest.fixture(scope="module")
def model(run: Path) -> Path:
    out = run.parent / "model"
    assert main(["export", str(run), "--site", "site-0", "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,000 files, of which ten cannot be read."""
    folder = tmp_path_factory.mktemp("images") / LONG
    folder.mkdir()
    pixels = np.random.default_rng(1).integers(0, 255, (30, 20, 3), dtype=np.uint8)
    for i in range(990):
        Image.fromarray(pixels + np.uint8(i % 7)).save(folder / f"{i:04d}.{('png', 'bmp')[i % 2]}")
    for name, content in BROKEN.items():
        (folder / name).write_bytes(content)
    (folder / "cut.png").write_bytes((folder / "0000.png").read_bytes()[:-200])
    Image.new("1", (9000, 9000)).save(folder / "bomb.png")
    return folder


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: Patch) -> None:
    monkeypatch.setattr(reading, "FILES", 64)


def test_a_thousand_files_of_which_ten_are_broken(model: Path, images: Path, tmp_path: Path, capsys: Printed) -> None:
    out = tmp_path / "classes.csv"
    capsys.readouterr()
    assert main(["predict", str(model), str(images), "--out", str(out)]) == 3
    told = capsys.readouterr()
    assert told.out == ""
    *reasons, count = told.err.splitlines()
    broken = sorted([*BROKEN, "cut.png", "bomb.png"])
    assert [line.split(": ")[1] for line in reasons] == [str(images / name) for name in broken]
    assert count == f"990 files read, 10 left out; {out}"
    rows = list(csv.DictReader(out.open(encoding="utf-8")))
    good = sorted(str(file) for file in images.iterdir() if file.name not in broken)
    assert [row["file"] for row in rows] == good
    predictor = Predictor.load(model)
    pixels = [Image.open(file).convert("RGB").resize((8, 8), resample=2).convert("L") for file in good[:5]]
    wanted = predictor.predict(np.stack(pixels)[:, None])
    assert [(int(row["label"]), float(row["distance"])) for row in rows[:5]] == [
        (one.label, pytest.approx(one.distance, rel=1e-5)) for one in wanted
    ]


def test_lines_of_json_name_what_was_left_out(model: Path, images: Path, capsys: Printed) -> None:
    files = [str(images / name) for name in ("0001.bmp", "text.jpg", "0002.png")]
    assert main(["predict", str(model), *files, "--json"]) == 3
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["file"] for line in told] == [files[0], files[2], files[1]]
    assert "is not a readable image" in told[2]["error"]


def test_a_long_path_stands_in_one_line(model: Path, images: Path, capsys: Printed, monkeypatch: Patch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    strange = images.parent / "two\nlines.png"
    strange.write_bytes((images / "0000.png").read_bytes())
    assert main(["predict", str(model), str(images / "0000.png"), str(strange)]) == 0
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.endswith(f"  {images / '0000.png'}")
    assert second.endswith("two\\nlines.png")


def test_a_name_that_is_no_text(model: Path, images: Path, tmp_path: Path) -> None:
    name = tmp_path / b"\xff.png".decode(errors="surrogateescape")
    name.write_bytes((images / "0000.png").read_bytes())
    assert main(["predict", str(model), str(name), "--out", str(tmp_path / "a.csv")]) == 0
    assert re.search(r"\\xff\.png,(prototype|head)", (tmp_path / "a.csv").read_text())


def test_what_cannot_work_keeps_the_file(run: Path, model: Path, images: Path, tmp_path: Path, capsys: Printed) -> None:
    out = tmp_path / "classes.csv"
    out.write_text("old")
    good, bad = str(images / "0000.png"), str(images / "text.jpg")
    for arguments, said in (
        ([str(model), bad, "--out", str(out)], "none of the 1 files could be read"),
        ([str(model), good, "--out", str(tmp_path / "classes.xls")], "must end in .csv"),
        ([str(model), good, "--out", str(out), "--device", "cuda:99"], "device = 'cuda:99': not usable here"),
        ([str(model), good, "--by", "oracle", "--out", str(out)], "by = 'oracle': this model predicts by"),
        ([str(run), good], f"is a run; first take a model out of it: protofl export {run}"),
        ([str(tmp_path), good], f"{tmp_path / WEIGHTS}"),
        ([str(model)], "FILE: which files?"),
    ):
        assert main(["predict", *arguments]) == 1, arguments
        assert said in capsys.readouterr().err
        assert out.read_text() == "old"


def test_rows_of_a_file_and_one_that_has_too_few_columns(tmp_path: Path, capsys: Printed) -> None:
    settings = {"algo": "fedproto", "models": "table3", "dataset": "wine", "partition": "iid"}
    folder = run_federation(run_config(tmp_path, **settings), 2).folder
    assert main(["export", str(folder), "--site", "site-1", "--out", str(tmp_path / "model")]) == 0
    header = ",".join(f"x{i}" for i in range(13))
    (tmp_path / "good.csv").write_text(f"{header}\n" + "\n".join([",".join(["1.5"] * 13)] * 3))
    (tmp_path / "few.csv").write_text("a,b\n1,2\n")
    np.save(tmp_path / "texts.npy", np.array([["a"] * 13]))
    capsys.readouterr()
    files = [str(tmp_path / name) for name in ("good.csv", "few.csv", "texts.npy")]
    assert main(["predict", str(tmp_path / "model"), *files, "--json"]) == 3
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["file"] for line in told] == [*(f"{files[0]}:{row}" for row in range(3)), *files[1:]]
    assert "a sample is [2]; the model takes [13]" in told[3]["error"]


def test_arrays_of_images_are_read_and_a_file_without_inputs_says_what_it_has(tmp_path: Path) -> None:
    pixels = np.arange(128, dtype=np.uint8).reshape(2, 1, 8, 8)
    np.savez(tmp_path / "some.npz", inputs=pixels)
    np.savez(tmp_path / "none.npz", x_train=pixels)
    files = [tmp_path / "some.npz", tmp_path / "none.npz"]
    (found,) = reading.read_ahead(files, card_of((1, 8, 8)))
    assert (found.inputs == pixels).all()
    assert found.problems == {str(files[1]): "has no array 'inputs', only 'x_train'"}


@pytest.mark.parametrize("algo", ["fedproto", "fedavg", "fedpcl"])
def test_every_test_sample_has_a_row_and_these_the_runs_accuracy(tmp_path: Path, capsys: Printed, algo: str) -> None:
    config = run_config(tmp_path, algo=algo, models="cnn4", test_samples=50)
    run = run_federation(config, 3)
    capsys.readouterr()
    assert main(["predict", str(run.folder), "--json"]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    facts = {"file": str(run.folder / "predictions.csv"), "rows": 150, "clients": ["site-0", "site-1", "site-2"]}
    assert json.loads(told.out) == {"command": "predict", "format": 1, **facts}
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


def test_data_that_changed_are_named(tmp_path: Path, capsys: Printed) -> None:
    run = run_federation(run_config(tmp_path, models="cnn4", rounds=1), 2).folder
    settings = (run / "settings.toml").read_text()
    (run / "settings.toml").write_text(settings.replace("seed = 42", "seed = 43"))
    assert main(["predict", str(run)]) == 0
    assert "the data, or what computes, are not the same" in capsys.readouterr().err
    (run / "settings.toml").write_text(settings.replace("test-samples = 30", "test-samples = 7"))
    assert main(["predict", str(run)]) == 1
    assert "7 test samples, not" in capsys.readouterr().err
