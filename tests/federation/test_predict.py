"""A trained model taken out of a run predicts as in it, also of many files, and knows what it does not know."""

import csv
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from protofl_common.basics.tensorfile import read_tensors, write_tensors
from protofl_common.config.options import SettingsError
from protofl_common.data import open_client_data
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.settings import Settings
from protofl_common.maths.prototypes import class_scores, fit_temperature, unknown_above
from protofl_common.runs.folder import CARD, WEIGHTS
from protofl_common.tools.cli import export, main, predict
from protofl_common.tools.inference import Predictor, TrainedModel
from server_app.checkpoint import alone_in
from tests.support.commands import output
from tests.support.fakes import write_run
from tests.support.given import Patch, Printed
from tests.support.harness import Outcome, client_of, run_config, run_federation

CLIENTS = 2
LONG = "a-folder-with-quite-a-long-name" * 7
BROKEN: dict[str, bytes] = {"empty.png": b"", "text.jpg": b"no image", "header.png": b"\x89PNG\r\n\x1a\n",
    "zeros.bmp": bytes(100), "cut.gif": b"GIF89a\x01\x00\x01\x00", "wrong.tif": b"II*\x00\xff\xff\xff\xff",
    "wrong.webp": b"RIFF\x10\x00\x00\x00WEBPVP8 ", "negative.pgm": b"P5 -1 -1 255\n"}  # fmt: skip


def trained(tmp_path: Path, **settings: Any) -> Outcome:
    return run_federation(
        run_config(tmp_path, **{"train_samples": 60, "test_samples": 60} | settings), CLIENTS
    )


def taken_out(run: Path, out: Path, site: str = "site-0", *more: str) -> Path:
    """The folder of the exported model of a site."""
    assert main(["export", str(run), "--site", site, "--out", str(out), *more]) == 0
    return out


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    settings = {"algo": "fedproto", "models": "cnn4", "dataset": "digits", "partition": "iid"}
    return trained(tmp_path_factory.mktemp("run"), **settings)


@pytest.fixture(scope="module")
def run(outcome: Outcome) -> Path:
    return outcome.folder


@pytest.fixture(scope="module")
def model(run: Path) -> Path:
    return taken_out(run, run.parent / "model")


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
    monkeypatch.setattr(predict, "FILES", 64)


@pytest.mark.parametrize(
    ("algo", "among"),
    [*((algo, "all") for algo in CATALOG), *((algo, "own") for algo in ("fedavg", "fedproto"))],
)
def test_an_exported_model_is_right_as_often_as_in_the_run(
    tmp_path: Path, algo: str, among: str, capsys: Any
) -> None:
    few = {"partition": "pathological", "classes_per_client": 3} if among == "own" else {}
    run = trained(tmp_path, algo=algo, predict_among=among, local_epochs=2, **few)
    for number in range(CLIENTS):
        data = client_of(run.grid.run_config, number, CLIENTS).data
        accuracy = run.summary["accuracy-of-clients"][f"site-{number}"]
        predictor = Predictor.load(
            taken_out(run.folder, tmp_path / f"model-{number}", f"site-{number}")
        )
        assert set(predictor.inferences) == set(accuracy)
        if "prototype" not in accuracy:
            strange = predictor.predict(255 - data.test_inputs)
            assert {(one.nearest, one.distance, one.unknown) for one in strange} == {
                (None, None, False)
            }
        for by, wanted in accuracy.items():
            labels = [one.label for one in predictor.predict(data.test_inputs, by)]
            assert (np.array(labels) == data.test_labels).mean() == wanted
    if algo == "fedpcl":
        with pytest.raises(SettingsError, match="by = 'head': this model predicts by prototype"):
            predictor.predict(data.test_inputs, "head")
        out = tmp_path / "onnx"
        assert (
            main(["export", str(run.folder), "--site", "site-0", "--out", str(out), "--onnx"]) == 1
        )
        assert "frozen backbones" in capsys.readouterr().err
        assert not out.exists()


def test_the_command_line_says_what_python_says(
    outcome: Outcome, tmp_path: Path, capsys: Printed
) -> None:
    pixels = client_of(outcome.grid.run_config, 1, CLIENTS).data.test_inputs
    folder, out = tmp_path / "images", taken_out(outcome.folder, tmp_path / "model", "site-1")
    folder.mkdir()
    for index, image in enumerate(pixels):
        Image.fromarray(image[0]).save(folder / f"{index:04d}.png")
    told = [
        json.loads(line)
        for line in output(capsys, "predict", out, folder, "--json").out.splitlines()
    ]
    known = Predictor.load(out).predict(pixels)
    assert [one["file"] for one in told] == sorted(str(file) for file in folder.iterdir())
    for name in ("label", "distance", "unknown"):
        assert [one[name] for one in told] == [getattr(one, name) for one in known]
    assert 0 < sum(one["unknown"] for one in told) <= 0.05 * len(told)
    assert all(0 < one["probability"] <= 1 for one in told)
    assert known[0].name in output(capsys, "predict", out, folder / "0000.png").out
    assert main(["predict", str(out), *[str(folder / "0000.png")] * 2, "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1  # a file that is named twice
    (out / "model.onnx").touch()
    taken_out(outcome.folder, out)
    assert not (out / "model.onnx").exists()  # which was another model's
    assert (
        main(["export", str(outcome.folder), "--site", "site-0", "--out", str(folder / "0000.png")])
        == 1
    )
    assert "protofl: this cannot work" in capsys.readouterr().err


def test_the_card_says_what_the_model_is(tmp_path: Path) -> None:
    run = trained(tmp_path, algo="fedtgp", models="htcnn8", local_epochs=2)
    out = taken_out(run.folder, tmp_path / "model", "site-1")
    card = json.loads((out / CARD).read_text())
    facts = {
        "run": run.folder.name,
        "site": "site-1",
        "algorithm": "fedtgp",
        "round": 2,
        "arch": "htcnn-2",
    }
    facts |= {"input-shape": [3, 16, 16], "input-type": "uint8", "similarity": "l2"}
    facts |= {
        "classes": [str(digit) for digit in range(10)],
        "accuracy": run.summary["accuracy-of-clients"]["site-1"],
    }
    assert card | facts == card
    assert card["unknown-above"] > 0
    assert r"| classes | \<male>, a\|b, \_c\_ |" in [
        *export._table({"classes": "<male>, a|b, _c_"})
    ]
    about = (out / "README.md").read_text()
    for said in (
        "| network | htcnn-2 |",
        "| data | digit-domains, partition feature-shift, 2 clients |",
        "local-epochs",
        f"An input farther than {card['unknown-above']:.4g} from every prototype is called unknown.",
        f"| right by head | {100 * card['accuracy']['head']:.2f} % |",
        "Chosen on these same test samples: that it predicts by",
        "and the limit above which an input is unknown",
        "What was chosen on test data makes these figures a little too high.",
    ):
        assert said in about
    assert "cache-dir" not in about
    taken_out(run.folder, out, "site-1", "--unknown", "0")
    assert "unknown" not in (out / "README.md").read_text()
    strange = 255 - client_of(run.grid.run_config, 1, CLIENTS).data.test_inputs
    assert not any(one.unknown for one in Predictor.load(out).predict(strange))
    model = TrainedModel.read(file := run.folder / "clients/site-1" / WEIGHTS)
    replace(model, card=replace(model.card, test_samples=0)).write(file)
    about = (taken_out(run.folder, out, "site-1") / "README.md").read_text()
    assert about.endswith(
        "site-1: nothing measured: no test samples, or too few of each class (min-class-samples)\n"
    )


def test_a_run_of_separate_machines_says_where_its_models_are(
    tmp_path: Path, capsys: Printed
) -> None:
    write_run(
        tmp_path / "runs" / "first",
        {"algo": "local"},
        [{"north": {"head": 0.5}, "south": {"head": 0.5}}] * 2,
    )
    said = output(capsys, "export", tmp_path / "runs" / "first", status=1).err
    assert "they stayed with its sites, north, south: on a site's own machine\n" in said
    assert "protofl export STATE-DIR/first --out model" in said
    assert main(["predict", str(tmp_path / "runs" / "first")]) == 1
    assert "no trained models in it; they stayed with its sites, north" in capsys.readouterr().err


def test_strange_images_are_unknown_and_the_own_ones_are_not(tmp_path: Path) -> None:
    """Inverted digits, dark on white, among a model's own, white on dark."""
    settings: dict[str, Any] = {"algo": "fedproto", "rounds": 3, "local_epochs": 5, "dataset": "digits",
        "partition": "iid"}  # fmt: skip
    run = trained(tmp_path, train_samples=300, test_samples=300, **settings)
    model = TrainedModel.read(run.folder / "clients" / "site-0" / WEIGHTS)
    data = client_of(run.grid.run_config, 0, CLIENTS).data
    assert np.mean([one.unknown for one in Predictor(model).predict(data.test_inputs)]) <= 0.05
    assert np.mean([one.unknown for one in Predictor(model).predict(255 - data.test_inputs)]) > 0.3
    with pytest.raises(ValueError, match="not uint8"):
        Predictor(model).predict(np.zeros((1, 1, 9, 9)))


def crafted(out: Path, changes: dict[str, Any]) -> None:
    """Write a model's file again, with other entries on its card; None removes one, and ``facts`` is all of it."""
    tensors, facts = read_tensors(out / WEIGHTS, torch.device("cpu"))
    card = json.loads(facts["card"]) | changes
    card = {name: value for name, value in card.items() if value is not None}
    write_tensors(
        out / WEIGHTS, tensors, facts | {"card": changes.get("facts") or json.dumps(card)}
    )


CRAFTED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown network": ({"arch": "vgg"}, "arch is 'vgg', not one of"),
    "another network": (
        {"arch": "resnet10"},
        "the weights are not of the network on the model's card",
    ),
    "a huge one": ({"feature_dim": 10**7}, "its prototypes are not of the model on its card"),
    "a huge input": (
        {"input_shape": [3, 2048, 2048]},
        "the weights are not of the network on the model's card",
    ),
    "no input": (
        {"arch": "gaussian-lda", "input_shape": []},
        "the weights are not of the network on the model's card",
    ),
    "no network": ({"arch": None}, "its card is not one of a model (arch: Field required)"),
    "fewer classes": ({"classes": ["one"]}, "its prototypes are not of the model on its card"),
    "a class that forges a terminal": ({"classes": ["\x1b[2J"] * 10}, "classes = "),
    "a site that does": ({"site": "\x1b[2J"}, "site = "),
    "a number as text": ({"round": "3"}, "round = '3'"),
    "another way to predict": ({"inference": "oracle"}, "inference = 'oracle'"),
    "a file as a backbone": (
        {"backbones": ["file:small:/etc/passwd"]},
        "asks for the backbone file:small:/etc/passwd",
    ),
    "no JSON": ({"facts": "{"}, "its card is not one of a model"),
}


def test_a_strangers_model_gives_one_clear_error(
    run: Path, images: Path, tmp_path: Path, capsys: Printed
) -> None:
    out, image = taken_out(run, tmp_path / "model"), str(images / "0000.png")
    whole = (out / WEIGHTS).read_bytes()
    for name, (changes, said) in CRAFTED.items():
        crafted(out, changes)
        assert said in (told := output(capsys, "predict", out, image, status=1).err), (name, told)
        assert "\x1b" not in told
        (out / WEIGHTS).write_bytes(whole)
    before = (client := run / "clients" / "site-0" / WEIGHTS).read_bytes()
    crafted(client.parent, CRAFTED["a file as a backbone"][0])
    for command in ("predict", "audit"):
        assert CRAFTED["a file as a backbone"][1] in output(capsys, command, run, status=1).err
    client.write_bytes(before)
    tensors, facts = read_tensors(out / WEIGHTS, torch.device("cpu"))
    write_tensors(
        out / WEIGHTS, tensors | {"prototypes.labels": tensors["prototypes.labels"][None]}, facts
    )
    assert (
        "its prototypes are not of the model on its card"
        in output(capsys, "predict", out, image, status=1).err
    )
    (out / WEIGHTS).write_bytes(whole)
    for file, content in ((CARD, b'{"unknown-above": [1]}'), (WEIGHTS, b"nothing")):
        (out / file).write_bytes(content)
        assert f"{out / file}" in output(capsys, "predict", out, image, status=1).err


def test_class_scores_and_the_limit_of_the_unknown_by_hand() -> None:
    """n = 19: of 20 images, one may be above the largest of the others, a share of 5 %."""
    scores = class_scores(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([2, 0, 2]), 4)
    assert scores.tolist() == [[-4.0, -math.inf, -1.0, -math.inf]]
    assert [unknown_above(torch.arange(1.0, 20.0), share) for share in (0.05, 0.10, 0.04)] == [
        19.0,
        18.0,
        math.inf,
    ]
    assert unknown_above(torch.empty(0), 0.05) == math.inf


def test_the_temperature_makes_probabilities_true() -> None:
    generator = torch.Generator().manual_seed(1)
    scores = -20 * torch.rand(20_000, 5, generator=generator)
    labels = torch.multinomial((scores / 7).softmax(1), 1, generator=generator)[:, 0]
    assert fit_temperature(scores, labels) == pytest.approx(7, rel=0.08)
    assert fit_temperature(torch.full((3, 2), -math.inf), torch.tensor([0, 1, 1])) == 1.0


def card_of(shape: tuple[int, ...]) -> Any:
    """What of a model's card reading needs."""
    return SimpleNamespace(input_shape=shape, input_type="uint8", columns=(), fill=())


def test_a_thousand_files_of_which_ten_are_broken(
    model: Path, images: Path, tmp_path: Path, capsys: Printed
) -> None:
    """Lines of JSON name what was left out, too."""
    out = tmp_path / "classes.csv"
    told = output(capsys, "predict", model, images, "--out", out, status=3)
    assert told.out == ""
    *reasons, count = told.err.splitlines()
    broken = sorted([*BROKEN, "cut.png", "bomb.png"])
    assert [line.split(": ")[1] for line in reasons] == [str(images / name) for name in broken]
    assert count == f"990 files read, 10 left out; {out}"
    rows = list(csv.DictReader(out.open(encoding="utf-8")))
    good = sorted(str(file) for file in images.iterdir() if file.name not in broken)
    assert [row["file"] for row in rows] == good
    predictor = Predictor.load(model)
    pixels = [
        Image.open(file).convert("RGB").resize((8, 8), resample=2).convert("L") for file in good[:5]
    ]
    wanted = predictor.predict(np.stack(pixels)[:, None])
    assert [int(row["label"]) for row in rows[:5]] == [one.label for one in wanted]
    assert [float(row["distance"]) for row in rows[:5]] == pytest.approx(
        [one.distance for one in wanted], rel=1e-5
    )
    files = [str(images / name) for name in ("0001.bmp", "text.jpg", "0002.png")]
    told = [
        json.loads(line)
        for line in output(capsys, "predict", model, *files, "--json", status=3).out.splitlines()
    ]
    assert [line["file"] for line in told] == [files[0], files[2], files[1]]
    assert "is not a readable image" in told[2]["error"]


def test_a_long_or_odd_path_stands_in_one_line(
    model: Path, images: Path, capsys: Printed, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    strange, out = images.parent / "two\nlines.png", images.parent / "a.csv"
    strange.write_bytes((images / "0000.png").read_bytes())
    _, first, second = output(
        capsys, "predict", model, images / "0000.png", strange
    ).out.splitlines()
    assert first.endswith(f"  {images / '0000.png'}")
    assert second.endswith("two\\nlines.png")
    name = images.parent / b"\xc3\xbc\xff.png".decode(errors="surrogateescape")
    name.write_bytes((images / "0000.png").read_bytes())
    for how in (["--out", str(out)], ["--json"]):
        assert main(["predict", str(model), str(name), *how]) == 0
    assert "\\u00fc" in capsys.readouterr().out, (
        "JSON loses nothing, whatever characters a terminal has"
    )
    assert re.search(r"\\xff\.png,(prototype|head)", out.read_text())
    monkeypatch.chdir(images.parent)
    Path("=1+1.png").write_bytes(strange.read_bytes())
    assert main(["predict", str(model), "=1+1.png", "--out", str(out)]) == 0
    assert out.read_text().splitlines()[1].startswith("'=1+1.png,"), "no formula of a spreadsheet"
    plain = [predict._FORMULA.sub("'", text) for text in ("-1", "+", "+a", "=\n1", "")]
    assert plain == ["-1", "+", "'+a", "'=\n1", ""]


def test_what_cannot_work_keeps_the_file(
    run: Path, model: Path, images: Path, tmp_path: Path, capsys: Printed
) -> None:
    out = tmp_path / "classes.csv"
    out.write_text("old")
    good, bad, empty = str(images / "0000.png"), str(images / "text.jpg"), str(run)
    for words, said in (
        (["export", str(tmp_path)], "no trained models in it"),
        (["export", str(run)], "choose with --site: site-0, site-1"),
        (["export", str(run), "--site", "site-7"], "choose site-0, site-1"),
        (["export", str(run), "--site", "site-0", "--unknown", "1"], "at least 0 and below 1"),
        (["predict", str(model), bad, "--out", str(out)], "none of these files could be read"),
        (["predict", str(model), str(tmp_path / "none.png")], "there is no such file"),
        (["predict", str(model), empty], "no images in this folder"),
        (["predict", str(model), str(model / CARD)], "is not a readable image"),
        (["predict", str(model), good, "--out", str(tmp_path / "classes.xls")], "must end in .csv"),
        (
            ["predict", str(model), good, "--out", str(out), "--device", "cuda:99"],
            "'cuda:99': not usable here",
        ),
        (
            ["predict", str(model), good, "--by", "oracle", "--out", str(out)],
            "'oracle': this model predicts by",
        ),
        (
            ["predict", str(run), good],
            f"is a run; first take a model out of it: protofl export {run}",
        ),
        (["predict", str(tmp_path), good], f"{tmp_path / WEIGHTS}"),
        (["predict", str(model)], "FILE: which files?"),
    ):
        assert said in output(capsys, *words, status=1).err, words
        assert out.read_text() == "old"


def test_rows_of_a_file_and_one_that_has_too_few_columns(tmp_path: Path, capsys: Printed) -> None:
    settings = {"algo": "fedproto", "models": "table3", "dataset": "wine", "partition": "iid"}
    folder = run_federation(run_config(tmp_path, **settings), 2).folder
    assert main(["export", str(folder), "--site", "site-1", "--out", str(tmp_path / "model")]) == 0
    header = ",".join(f"x{i}" for i in range(13))
    (tmp_path / "good.csv").write_text(f"{header}\n" + "\n".join([",".join(["1.5"] * 13)] * 3))
    (tmp_path / "few.csv").write_text("a,b\n1,2\n")
    np.save(tmp_path / "texts.npy", np.array([["a"] * 13]))
    files = [str(tmp_path / name) for name in ("good.csv", "few.csv", "texts.npy")]
    lines = output(
        capsys, "predict", tmp_path / "model", *files, "--json", status=3
    ).out.splitlines()
    told = [json.loads(line) for line in lines]
    assert [line["file"] for line in told] == [
        *(f"{files[0]}:{row}" for row in range(3)),
        *files[1:],
    ]
    assert "a sample is [2]; the model takes [13]" in told[3]["error"]


def test_arrays_of_images_are_read_and_a_file_without_inputs_says_what_it_has(
    tmp_path: Path,
) -> None:
    pixels = np.arange(128, dtype=np.uint8).reshape(2, 1, 8, 8)
    np.savez(tmp_path / "some.npz", inputs=pixels)
    np.savez(tmp_path / "none.npz", x_train=pixels)
    files = [tmp_path / "some.npz", tmp_path / "none.npz"]
    (found,) = predict.read_batches(files, card_of((1, 8, 8)))
    assert (found.inputs == pixels).all()
    assert found.problems == {str(files[1]): "has no array 'inputs', only 'x_train'"}


@pytest.mark.parametrize("algo", ["fedproto", "fedavg", "fedpcl"])
def test_every_test_sample_has_a_row_and_these_the_runs_accuracy(
    tmp_path: Path, capsys: Printed, algo: str
) -> None:
    config = run_config(tmp_path, algo=algo, models="cnn4", test_samples=50)
    run = run_federation(config, 3)
    told = output(capsys, "predict", run.folder, "--json")
    facts = {
        "file": str(run.folder / "predictions.csv"),
        "rows": 150,
        "clients": ["site-0", "site-1", "site-2"],
    }
    assert (json.loads(told.out), told.err) == ({"command": "predict", "format": 1, **facts}, "")
    rows = list(csv.DictReader((run.folder / "predictions.csv").open(encoding="utf-8")))
    assert len(rows) == 150
    settings = Settings.from_run_config(config)
    for number in range(3):
        own = [row for row in rows if row["client"] == f"site-{number}"]
        data = open_client_data(
            settings.data, seed=settings.run.seed, partition=number, num_partitions=3
        )
        assert [int(row["label"]) for row in own] == data.test_labels.tolist()
        for way, accuracy in run.summary["accuracy-of-clients"][f"site-{number}"].items():
            assert np.mean([row[way] == row["label"] for row in own]) == accuracy
            scores = [
                [float(row[f"{way}-{label}"] or "-inf") for label in range(10)] for row in own
            ]
            assert [str(np.argmax(one)) for one in scores] == [row[way] for row in own]


def test_data_that_changed_are_named_and_so_is_a_run_that_goes_on(
    tmp_path: Path, capsys: Printed
) -> None:
    run = run_federation(run_config(tmp_path, models="cnn4", rounds=1), 2).folder
    with alone_in(run):
        assert (
            f"another process is at work on {run}" in output(capsys, "predict", run, status=1).err
        )
    settings = (run / "settings.toml").read_text()
    (run / "settings.toml").write_text(settings.replace("seed = 42", "seed = 43"))
    assert "the data, or what computes, are not the same" in output(capsys, "predict", run).err
    (run / "settings.toml").write_text(settings.replace("test-samples = 30", "test-samples = 7"))
    assert "7 test samples, not" in output(capsys, "predict", run, status=1).err
    (run / "summary.json").write_text(
        (run / "summary.json").read_text().replace('"division": 1', '"division": 2')
    )
    assert main(["predict", str(run)]) == main(["audit", str(run)]) == 1
    assert (
        capsys.readouterr().err.count(
            f"{run}: its clients had other samples: 'feature-shift' has changed"
        )
        == 2
    )
