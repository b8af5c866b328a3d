"""A trained model taken out of a run predicts as in it, and knows what it does not know."""

import csv
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import numpy as np
import pytest
import torch
from PIL import Image

from protofl_common.basics.tensorfile import read_tensors, write_tensors
from protofl_common.config.options import SettingsError
from protofl_common.config.python_names import allowing
from protofl_common.data.raw import DataError
from protofl_common.experiment.catalog import CATALOG
from protofl_common.maths.prototypes import class_scores, unknown_above
from protofl_common.runs.folder import CARD, WEIGHTS
from protofl_common.tasks import task_of
from protofl_common.tools.cli import export, predict
from protofl_common.tools.inference import Predictor, TrainedModel
from server_app.run.checkpoint import locked_run
from tests.support import ROOT
from tests.support.commands import SCHEMA, export_model, json_printed, output
from tests.support.fakes import write_run
from tests.support.harness import client_of, federate, run_config, run_federation
from tests.support.plain import assert_equal

CLIENTS = 2
LONG = "a-folder-with-quite-a-long-name" * 7
BROKEN = {
    "empty.png": b"",
    "text.jpg": b"no image",
    "header.png": b"\x89PNG\r\n\x1a\n",
    "zeros.bmp": bytes(100),
    "cut.gif": b"GIF89a\x01\x00\x01\x00",
    "wrong.tif": b"II*\x00\xff\xff\xff\xff",
    "wrong.webp": b"RIFF\x10\x00\x00\x00WEBPVP8 ",
    "negative.pgm": b"P5 -1 -1 255\n",
}


def small_run(tmp_path, **settings):
    small = {"train_samples": 60, "test_samples": 60}
    return federate(tmp_path, clients=CLIENTS, **small | settings)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    settings = {"algo": "fedproto", "models": "cnn4", "dataset": "digits", "partition": "iid"}
    return small_run(tmp_path_factory.mktemp("run"), **settings)


@pytest.fixture(scope="module")
def run(outcome):
    return outcome.folder


@pytest.fixture(scope="module")
def model(run):
    return export_model(run, run.parent / "model")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Write 1,000 files, of which ten cannot be read, and return their folder.

    The ten are the eight of `BROKEN`, an image that is cut short, and one of too many pixels.
    """
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
def small_batches(monkeypatch):
    """Let 1,000 files be read in several batches."""
    monkeypatch.setattr(predict, "FILES_PER_BATCH", 64)


EXPORTED = [(algo, "all") for algo in CATALOG] + [("fedavg", "own"), ("fedproto", "own")]


@pytest.mark.parametrize(("algo", "among"), EXPORTED)
def test_an_exported_model_is_right_as_often_as_in_the_run(tmp_path, algo, among, capsys):
    """Each client's exported model has, by each way to predict, the accuracy of the run's end."""
    settings = {"algo": algo, "predict_among": among, "local_epochs": 2}
    if among == "own":
        settings |= {"partition": "pathological", "classes_per_client": 3}
    run = small_run(tmp_path, **settings)

    for number in range(CLIENTS):
        site = f"site-{number}"
        data = client_of(run.grid.run_config, partition=number, clients=CLIENTS).data
        accuracy = run.summary["accuracy-of-clients"][site]
        predictor = Predictor.load(export_model(run.folder, tmp_path / f"model-{number}", site))
        assert set(predictor.inferences) == set(accuracy)
        if "prototype" not in accuracy:  # then nothing is known of distances, or of the unknown
            for prediction in predictor.predict(255 - data.test_inputs):
                assert prediction.nearest is None
                assert prediction.distance is None
                assert not prediction.unknown
        for by, wanted in accuracy.items():
            labels = [prediction.label for prediction in predictor.predict(data.test_inputs, by)]
            assert (np.array(labels) == data.test_labels).mean() == wanted

    if algo == "fedpcl":  # predicts by prototypes alone, and its backbones cannot be exported
        with pytest.raises(SettingsError, match="by = 'head': this model predicts by prototype"):
            predictor.predict(data.test_inputs, "head")
        out = tmp_path / "onnx"
        words = ("export", run.folder, "--site", "site-0", "--out", out, "--onnx")
        assert "frozen backbones" in output(capsys, *words, status=1).err
        assert not out.exists()


def test_the_command_line_says_what_python_says(outcome, tmp_path, capsys):
    """`protofl predict` of image files prints what a `Predictor` says of the same pixels.

    A file that is named twice is predicted once.
    """
    pixels = client_of(outcome.grid.run_config, partition=1, clients=CLIENTS).data.test_inputs
    folder = tmp_path / "images"
    folder.mkdir()
    for index, image in enumerate(pixels):
        Image.fromarray(image[0]).save(folder / f"{index:04d}.png")
    first = folder / "0000.png"
    model = export_model(outcome.folder, tmp_path / "model", "site-1")

    lines = output(capsys, "predict", model, folder, "--json").out.splitlines()
    printed = [json.loads(line) for line in lines]
    known = Predictor.load(model).predict(pixels)

    assert [row["file"] for row in printed] == sorted(str(file) for file in folder.iterdir())
    for name in ("label", "distance", "unknown"):
        assert [row[name] for row in printed] == [getattr(one, name) for one in known]
    # the limit is such that 5 % of a client's own test samples are beyond it
    assert 0 < sum(row["unknown"] for row in printed) <= 0.05 * len(printed)
    assert all(0 < row["probability"] <= 1 for row in printed)
    assert known[0].name in output(capsys, "predict", model, first).out

    twice = output(capsys, "predict", model, first, first, "--json").out
    assert len(twice.splitlines()) == 1


def test_an_export_replaces_what_another_model_left_but_never_a_file(outcome, tmp_path, capsys):
    """An ONNX file of the model before is removed; a file in the place of the folder stays."""
    model = export_model(outcome.folder, tmp_path / "model", "site-1")
    (model / "model.onnx").touch()
    export_model(outcome.folder, model)

    assert not (model / "model.onnx").exists()

    file = tmp_path / "0000.png"
    file.write_bytes(b"any")
    words = ("export", outcome.folder, "--site", "site-0", "--out", file)

    assert "protofl: this cannot work" in output(capsys, *words, status=1).err
    assert file.read_bytes() == b"any"


def test_the_card_says_what_the_model_is(tmp_path):
    """So does the README beside it, for people; both say how the unknown is told."""
    run = small_run(tmp_path, algo="fedtgp", models="htcnn8", local_epochs=2)
    out = export_model(run.folder, tmp_path / "model", "site-1")

    card = json.loads((out / CARD).read_text())
    facts = {
        "run": run.folder.name,
        "site": "site-1",
        "algorithm": "fedtgp",
        "round": 2,
        "arch": "htcnn-2",
        "input-shape": [3, 16, 16],
        "input-type": "uint8",
        "similarity": "l2",
        "classes": [str(digit) for digit in range(10)],
        "accuracy": run.summary["accuracy-of-clients"]["site-1"],
    }

    assert card.items() >= facts.items()
    assert card["unknown-above"] > 0

    about = (out / "README.md").read_text()
    limit = f"{card['unknown-above']:.4g}"

    for text in (
        "| network | htcnn-2 |",
        "| data | digit-domains, partition feature-shift, 2 clients |",
        "local-epochs",
        f"| unknown | what is farther than {limit} from every prototype |",
        f"| right by head | {100 * card['accuracy']['head']:.2f} % |",
        "Chosen on these same test samples: that it predicts by",
        "What was chosen on test data makes these figures a little too high.",
    ):
        assert text in about
    assert "cache-dir" not in about

    # with --unknown 0 nothing is unknown, not even inverted images
    export_model(run.folder, out, "site-1", "--unknown", "0")
    assert "unknown" not in (out / "README.md").read_text()

    inverted = 255 - client_of(run.grid.run_config, partition=1, clients=CLIENTS).data.test_inputs
    assert not any(prediction.unknown for prediction in Predictor.load(out).predict(inverted))

    # a model without test samples
    file = run.folder / "clients/site-1" / WEIGHTS
    model = TrainedModel.read(file)
    replace(model, card=replace(model.card, test_samples=0)).write(file)
    about = (export_model(run.folder, out, "site-1") / "README.md").read_text()
    nothing = "nothing measured: no test samples, or too few of each class (min-class-samples)"

    assert about.endswith(f"site-1: {nothing}\n")


def test_names_of_classes_are_no_markup_in_the_readme():
    table = export._table({"classes": "<male>, a|b, _c_"})
    assert r"| classes | \<male>, a\|b, \_c\_ |" in table


def test_a_run_of_separate_machines_says_where_its_models_are(tmp_path, capsys):
    """Models of sites never reach the server's folder, so export and predict name the sites."""
    folder = tmp_path / "runs" / "first"
    accuracy = {"north": {"head": 0.5}, "south": {"head": 0.5}}
    write_run(folder, {"algo": "local"}, [accuracy] * 2)

    exported = output(capsys, "export", folder, status=1).err
    assert "they stayed with its sites, north, south: on a site's own machine\n" in exported
    assert "protofl export STATE-DIR/first-NUMBER --out model" in exported

    predicted = output(capsys, "predict", folder, status=1).err
    assert "no trained models in it; they stayed with its sites, north" in predicted


def test_strange_images_are_unknown_and_the_own_ones_are_not(tmp_path):
    """A model of digits, white on dark, finds inverted ones, dark on white, unknown more often."""
    run = small_run(
        tmp_path,
        algo="fedproto",
        dataset="digits",
        partition="iid",
        rounds=3,
        local_epochs=5,
        train_samples=300,
        test_samples=300,
    )
    predictor = Predictor(TrainedModel.read(run.folder / "clients" / "site-0" / WEIGHTS))
    digits = client_of(run.grid.run_config, partition=0, clients=CLIENTS).data.test_inputs

    def unknown_share(inputs):
        return float(np.mean([prediction.unknown for prediction in predictor.predict(inputs)]))

    assert unknown_share(digits) <= 0.05
    assert unknown_share(255 - digits) > 0.3
    with pytest.raises(ValueError, match="the model takes uint8"):
        predictor.predict(np.zeros((1, 1, 9, 9)))


def rewrite_card(out, changes):
    """Write a model's file again, with other entries on its card.

    None removes an entry; an entry ``facts`` takes the place of the whole text of the card.
    """
    tensors, facts = read_tensors(out / WEIGHTS, torch.device("cpu"))
    card = json.loads(facts["card"]) | changes
    card = {name: value for name, value in card.items() if value is not None}
    text = changes.get("facts") or json.dumps(card)
    write_tensors(out / WEIGHTS, tensors, facts | {"card": text})


OTHER_NETWORK = "the weights are not of the network on the model's card"
OTHER_PROTOTYPES = "its prototypes do not fit the model on its card"
CRAFTED = {
    "an unknown network": ({"arch": "vgg"}, "arch is 'vgg', not one of"),
    "another network": ({"arch": "resnet10"}, OTHER_NETWORK),
    "a huge network": ({"feature_dim": 10**7}, OTHER_PROTOTYPES),
    "a huge input": ({"input_shape": [3, 2048, 2048]}, OTHER_NETWORK),
    "no input": ({"arch": "gaussian-lda", "input_shape": []}, OTHER_NETWORK),
    "no network": ({"arch": None}, "its card is not one of a model (arch: Field required)"),
    "fewer classes": ({"classes": ["one"]}, OTHER_PROTOTYPES),
    "a class that forges a terminal": ({"classes": ["\x1b[2J"] * 10}, "classes = "),
    "a site that forges a terminal": ({"site": "\x1b[2J"}, "site = "),
    "a number as text": ({"round": "3"}, "round = '3'"),
    "another way to predict": ({"inference": "oracle"}, "inference = 'oracle'"),
    "a file as a backbone": (
        {"backbones": ["file:small:/etc/passwd"]},
        "asks for the backbone file:small:/etc/passwd",
    ),
    "no JSON": ({"facts": "{"}, "its card is not one of a model"),
}


def test_a_strangers_model_gives_one_clear_error(run, images, tmp_path, capsys):
    """A card that is not of the model, prototypes of another shape, files that are none.

    Nothing of it reaches the terminal unescaped.
    """
    out = export_model(run, tmp_path / "model")
    file = out / WEIGHTS
    whole = file.read_bytes()

    def error_of_predict():
        text = output(capsys, "predict", out, images / "0000.png", status=1).err
        assert isinstance(text, str)
        return text

    for name, (changes, reason) in CRAFTED.items():
        rewrite_card(out, changes)
        printed = error_of_predict()
        assert reason in printed, name
        assert "\x1b" not in printed
        file.write_bytes(whole)

    # a model in the folder of a run is read with the same care
    changes, reason = CRAFTED["a file as a backbone"]
    client = run / "clients" / "site-0" / WEIGHTS
    before = client.read_bytes()
    rewrite_card(client.parent, changes)

    for command in ("predict", "audit"):
        assert reason in output(capsys, command, run, status=1).err

    client.write_bytes(before)

    # labels of prototypes in two dimensions
    tensors, facts = read_tensors(file, torch.device("cpu"))
    tensors["prototypes.labels"] = tensors["prototypes.labels"][None]
    write_tensors(file, tensors, facts)

    assert OTHER_PROTOTYPES in error_of_predict()

    file.write_bytes(whole)

    (out / CARD).write_bytes(b'{"unknown-above": [1]}')
    assert str(out / CARD) in error_of_predict()

    file.write_bytes(b"nothing")
    assert str(file) in error_of_predict()


def test_class_scores_by_hand():
    """The score of a class is −d² for the distance d from the nearest of its prototypes, or −∞.

    One sample at distances 1, 2 and 3 from prototypes of the classes 2, 0 and 2, of four classes.
    """
    distances = torch.tensor([[1.0, 2.0, 3.0]])
    scores = class_scores(distances, torch.tensor([2, 0, 2]), num_classes=4)
    assert scores.tolist() == [[-4.0, -math.inf, -1.0, -math.inf]]


def test_the_limit_of_the_unknown_by_hand():
    """Of n = 19 distances, the limit for 5 % is the largest: a 20th is above it with 1 in 20.

    For 10 % it is the second largest. For less than 5 % there is none, as there is none of nothing.
    """
    distances = torch.arange(1.0, 20.0)
    assert unknown_above(distances, 0.05) == 19.0
    assert unknown_above(distances, 0.10) == 18.0
    assert unknown_above(distances, 0.04) == math.inf
    assert unknown_above(torch.empty(0), 0.05) == math.inf


def test_the_temperature_makes_probabilities_true():
    """Labels are drawn with the probabilities softmax(scores / 7)."""
    generator = torch.Generator().manual_seed(1)
    scores = -20 * torch.rand(20_000, 5, generator=generator)
    probabilities = (scores / 7).softmax(1)
    labels = torch.multinomial(probabilities, 1, generator=generator)[:, 0]

    assert task_of("abcde").temperature(scores, labels) == pytest.approx(7, rel=0.08)

    no_scores = torch.full((3, 2), -math.inf)
    assert task_of("ab").temperature(no_scores, torch.tensor([0, 1, 1])) == 1.0


def card_of(shape):
    """Return a card with what is needed to read inputs of a model."""
    return SimpleNamespace(input_shape=shape, input_type="uint8", columns=(), fill=())


def test_a_thousand_files_of_which_ten_are_broken(model, images, tmp_path, capsys):
    """The ten are named with the reason; the others have a row each with their prediction."""
    out = tmp_path / "classes.csv"
    broken = sorted([*BROKEN, "cut.png", "bomb.png"])
    good = sorted(str(file) for file in images.iterdir() if file.name not in broken)

    printed = output(capsys, "predict", model, images, "--out", out, status=3)

    assert printed.out == ""

    *reasons, count = printed.err.splitlines()
    files_named = []
    for line in reasons:
        _left_out, file, *_reason = line.split(": ")
        files_named.append(file)
    assert files_named == [str(images / name) for name in broken]
    assert count == "990 files read, 10 left out"

    rows = list(csv.DictReader(out.open(encoding="utf-8")))
    assert [row["file"] for row in rows] == good

    # five of them, read here as the model reads them
    pixels = []
    for file in good[:5]:
        image = Image.open(file).convert("RGB").resize((8, 8), resample=2).convert("L")
        pixels.append(np.asarray(image))
    wanted = Predictor.load(model).predict(np.stack(pixels)[:, None])

    assert [int(row["label"]) for row in rows[:5]] == [one.label for one in wanted]

    distances = [float(row["distance"]) for row in rows[:5]]
    assert distances == pytest.approx([one.distance for one in wanted], rel=1e-5)


def test_lines_of_json_name_what_was_left_out_too(model, images, capsys):
    """Of three files the second is no image: its line, the last one, has the error."""
    first = images / "0001.bmp"
    text = images / "text.jpg"
    second = images / "0002.png"

    printed = output(capsys, "predict", model, first, text, second, "--json", status=3).out

    lines = [json.loads(line) for line in printed.splitlines()]
    assert [line["file"] for line in lines] == [str(file) for file in (first, second, text)]
    *_predicted, of_text = lines
    assert "is not a readable image" in of_text["error"]


def test_a_long_or_odd_path_stands_in_one_line(model, images, tmp_path, capsys, monkeypatch):
    """On a terminal of 40 columns a path is not cut; a line break in a name is escaped.

    So is a byte of a name that is no text.
    """
    monkeypatch.setenv("COLUMNS", "40")
    image = images / "0000.png"
    two_lines = tmp_path / "two\nlines.png"
    two_lines.write_bytes(image.read_bytes())
    no_text = tmp_path / b"\xc3\xbc\xff.png".decode(errors="surrogateescape")
    no_text.write_bytes(image.read_bytes())
    table = tmp_path / "a.csv"

    _, first, second = output(capsys, "predict", model, image, two_lines).out.splitlines()
    assert first.endswith(f"  {image}")
    assert second.endswith("two\\nlines.png")

    output(capsys, "predict", model, no_text, "--out", table)
    assert re.search(r"\\xff\.png,(prototype|head)", table.read_text())

    printed = output(capsys, "predict", model, no_text, "--json").out
    assert "\\u00fc" in printed, "JSON loses nothing, whatever characters a terminal has"


def test_the_name_of_a_file_is_no_formula_of_a_spreadsheet(
    model, images, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("=1+1.png").write_bytes((images / "0000.png").read_bytes())
    output(capsys, "predict", model, "=1+1.png", "--out", "a.csv")

    _head, row = Path("a.csv").read_text().splitlines()
    assert row.startswith("'=1+1.png,")

    # numbers, and a single sign, are no formulas
    texts = ("-1", "+", "+a", "=\n1", "")
    escaped = [predict._FORMULA.sub("'", text) for text in texts]
    assert escaped == ["-1", "+", "'+a", "'=\n1", ""]


def test_a_command_that_cannot_work_keeps_the_file_of_an_earlier_one(
    run, model, images, tmp_path, capsys
):
    """Each wrong use of export and predict is one clear error, and ``--out`` stays as it was."""
    out = tmp_path / "classes.csv"
    out.write_text("old")
    good = images / "0000.png"
    to_out = (model, good, "--out", out)
    first_export = f"is a run; first take a model out of it: protofl export {run}"

    for reason, *words in (
        ("no trained models in it", "export", tmp_path),
        ("choose with --site: site-0, site-1", "export", run),
        ("choose site-0, site-1", "export", run, "--site", "site-7"),
        ("at least 0 and below 1", "export", run, "--site", "site-0", "--unknown", "1"),
        ("none of these files could be read", "predict", model, images / "text.jpg", "--out", out),
        ("there is no such file", "predict", model, tmp_path / "none.png"),
        ("no images in this folder", "predict", model, run),
        ("is not a readable image", "predict", model, model / CARD),
        ("must end in .csv", "predict", model, good, "--out", tmp_path / "classes.xls"),
        ("'cuda:99': not usable here", "predict", *to_out, "--device", "cuda:99"),
        ("'auto': not usable here", "predict", *to_out, "--device", "auto"),
        ("'oracle': this model predicts by", "predict", *to_out, "--by", "oracle"),
        (first_export, "predict", run, good),
        (str(tmp_path / WEIGHTS), "predict", tmp_path, good),
        ("FILE: which files?", "predict", model),
    ):
        assert reason in output(capsys, *words, status=1).err, words
        assert out.read_text() == "old"


def test_rows_of_a_file_and_one_that_has_too_few_columns(tmp_path, capsys):
    """A model of rows of 13 numbers reads a table; three files that it cannot read are named.

    These are a table of two columns, an array of texts, and one with gaps. Every line of JSON fits
    the schema.
    """
    settings = {"algo": "fedproto", "models": "table3", "dataset": "wine", "partition": "iid"}
    run = federate(tmp_path, clients=2, **settings).folder
    model = export_model(run, tmp_path / "model", "site-1")
    good = tmp_path / "good.csv"
    header = ",".join(f"x{i}" for i in range(13))
    row = ",".join(["1.5"] * 13)
    good.write_text("\n".join([header, row, row, row]))
    few = tmp_path / "few.csv"
    few.write_text("a,b\n1,2\n")
    texts = tmp_path / "texts.npy"
    np.save(texts, np.array([["a"] * 13]))

    gaps = tmp_path / "gaps.npy"
    np.save(gaps, np.array([[1.5] * 13, [np.nan] * 13]))

    printed = output(capsys, "predict", model, good, few, texts, gaps, "--json", status=3).out

    lines = [json.loads(line) for line in printed.splitlines()]
    files = [f"{good}:0", f"{good}:1", f"{good}:2", str(few), str(texts), str(gaps)]

    assert [line["file"] for line in lines] == files
    *_predicted, of_few, _of_texts, of_gaps = lines
    assert "a sample is float32 [2]; the model takes float32 [13]" in of_few["error"]
    assert "sample 1 has nan at [0]" in of_gaps["error"]
    for line in lines:
        jsonschema.validate(line, SCHEMA)
    assert json_printed(capsys, "predict", str(run))["rows"] > 0
    predictor = Predictor.load(model)
    for method in (predictor.predict, predictor.scores, predictor.features, predictor.outputs):
        with pytest.raises(DataError, match="sample 1 has nan"):
            method(np.load(gaps))


def test_arrays_of_images_are_read_and_a_file_without_inputs_says_what_it_has(tmp_path):
    """Of two files of arrays one has ``inputs``, two images of 8×8, and the other has not."""
    pixels = np.arange(128, dtype=np.uint8).reshape(2, 1, 8, 8)
    some = tmp_path / "some.npz"
    none = tmp_path / "none.npz"
    np.savez(some, inputs=pixels)
    np.savez(none, x_train=pixels)
    (found,) = predict.read_batches([some, none], card_of((1, 8, 8)))

    assert (found.inputs == pixels).all()
    assert found.problems == {str(none): f"{none}: has no array 'inputs', only 'x_train'"}

    # a file has three colours, and the model takes arrays of four channels
    np.savez(some, inputs=np.zeros((2, 4, 8, 8), np.uint8))
    photo = tmp_path / "photo.png"
    Image.new("RGB", (8, 8)).save(photo)
    (found,) = predict.read_batches([some, photo], card_of((4, 8, 8)))
    assert len(found.inputs) == 2
    assert "a sample is uint8 [3, 8, 8]; the model takes" in found.problems[str(photo)]


@pytest.mark.parametrize("algo", ["fedproto", "fedavg", "fedpcl"])
def test_every_test_sample_has_a_row_and_these_the_runs_accuracy(tmp_path, capsys, algo):
    """`protofl predict RUN` writes a table with the label, the predictions and scores of each.

    A prediction is the class with the highest score; a class without one has none.
    """
    config = run_config(tmp_path, algo=algo, models="cnn4", test_samples=50)
    run = run_federation(config, clients=3)
    file = run.folder / "predictions.csv"
    sites = ["site-0", "site-1", "site-2"]

    printed = output(capsys, "predict", run.folder, "--json")

    test_samples = 3 * 50  # 50 of each client
    facts = {"file": str(file), "rows": test_samples, "clients": sites}
    assert json.loads(printed.out) == {"command": "predict", "format": 1, **facts}
    assert printed.err == ""

    rows = list(csv.DictReader(file.open(encoding="utf-8")))
    assert len(rows) == test_samples

    for number, site in enumerate(sites):
        own = [row for row in rows if row["client"] == site]
        labels = client_of(config, partition=number).data.test_labels
        assert [int(row["label"]) for row in own] == labels.tolist()
        for way, accuracy in run.summary["accuracy-of-clients"][site].items():
            assert np.mean([row[way] == row["label"] for row in own]) == accuracy
            for row in own:
                scores = [float(row[f"{way}-{label}"] or "-inf") for label in range(10)]
                assert str(np.argmax(scores)) == row[way]


def test_features_and_figures_of_a_run(tmp_path, capsys):
    """The features that are stored are those of each client's model, and give its scores."""
    config = run_config(tmp_path, algo="fedproto", models="cnn4", test_samples=20)
    run = run_federation(config, clients=2)
    features = tmp_path / "features.npz"
    figures = tmp_path / "figures"

    output(capsys, "predict", run.folder, "--features", features, "--figures", figures)

    stored = np.load(features)
    names = ("confusion-head", "confusion-prototype", "features")
    assert {file.stem for file in figures.iterdir()} == set(names)

    predictor = Predictor(TrainedModel.read(run.folder / "clients" / "site-1" / WEIGHTS))
    data = client_of(config, partition=1, clients=CLIENTS).data
    is_its = stored["client"] == "site-1"
    assert stored["label"][is_its].tolist() == data.test_labels.tolist()

    found = stored["features"][is_its]
    np.testing.assert_allclose(found, predictor.features(data.test_inputs), atol=1e-5)
    logits = predictor.model.head(torch.from_numpy(found))
    torch.testing.assert_close(logits, predictor.scores(data.test_inputs)["head"])


def test_a_run_can_start_from_another_runs_frozen_body(tmp_path, monkeypatch):
    """This follows the lines of docs/models.md."""
    settings = {"dataset": "digits", "partition": "iid", "models": "mlp-1", "rounds": 1}
    first_run = small_run(tmp_path / "first", algo="fedavg", **settings)
    first = first_run.folder / "clients/site-0" / WEIGHTS
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n([^`]*def trained.*?)```", page, re.DOTALL)
    in_page = "runs/first/clients/site-0/model.safetensors"
    assert in_page in code
    (tmp_path / "started.py").write_text(code.replace(in_page, str(first)))
    monkeypatch.syspath_prepend(tmp_path)

    with allowing(["started"]):
        settings["models"] = "started:trained"
        second = small_run(tmp_path / "second", algo="fedproto", **settings)
        body = TrainedModel.read(first).build().body.state_dict()
        left = second.folder / "clients/site-1" / WEIGHTS
        kept = TrainedModel.read(left).build().body.state_dict()

    assert_equal(kept, body)


def test_data_that_changed_are_named_and_so_is_a_run_that_goes_on(tmp_path, capsys):
    """Predictions of a run need the test samples that its clients had, and a run that has ended."""
    run = federate(tmp_path, clients=2, models="cnn4", rounds=1).folder
    with locked_run(run):
        busy = output(capsys, "predict", run, status=1).err

    assert f"another process is at work on {run}" in busy

    # with another seed as many other samples are drawn: the accuracy is not the same
    file = run / "settings.toml"
    settings = file.read_text()
    file.write_text(settings.replace("seed = 42", "seed = 43"))

    assert "the data, or what computes, are not the same" in output(capsys, "predict", run).err

    file.write_text(settings.replace("test-samples = 30", "test-samples = 7"))
    assert "7 test samples, not" in output(capsys, "predict", run, status=1).err

    summary = run / "summary.json"
    summary.write_text(summary.read_text().replace('"division": 1', '"division": 2'))
    divided = f"{run}: its clients had other samples: 'feature-shift' has changed"

    for command in ("predict", "audit"):
        assert output(capsys, command, run, status=1).err.count(divided) == 1
