"""A trained model taken out of a run: it predicts as it did in the last evaluation, and knows what it does not know."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from client_app.client import Client
from protofl_common.basics.tensorfile import read_tensors, write_tensors
from protofl_common.experiment.catalog import CATALOG
from protofl_common.maths.prototypes import class_scores, fit_temperature, unknown_above
from protofl_common.runs.folder import CARD, WEIGHTS
from protofl_common.tools.cli import main
from protofl_common.tools.inference import Predictor, TrainedModel
from tests.support.fakes import write_run
from tests.support.given import Printed
from tests.support.harness import Outcome, client_of, run_config, run_federation

CLIENTS = 2


def trained(tmp_path: Path, **settings: Any) -> Outcome:
    settings = {"train_samples": 60, "test_samples": 60} | settings
    return run_federation(run_config(tmp_path, **settings), CLIENTS)


def site(run: Outcome, number: int) -> Client:
    return client_of(run.grid.run_config, number, CLIENTS)


def write_images(folder: Path, images: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for index, image in enumerate(images):
        Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0)).save(folder / f"{index:04d}.png")
    return folder


@pytest.mark.parametrize(
    ("algo", "among"), [*((algo, "all") for algo in CATALOG), *((algo, "own") for algo in ("fedavg", "fedproto"))]
)
def test_an_exported_model_is_right_as_often_as_in_the_last_evaluation(tmp_path: Path, algo: str, among: str) -> None:
    few = {"partition": "pathological", "classes_per_client": 3} if among == "own" else {}
    run = trained(tmp_path, algo=algo, predict_among=among, local_epochs=2, **few)
    for number in range(CLIENTS):
        data = site(run, number).data
        accuracy = run.summary["accuracy-of-clients"][f"site-{number}"]
        out = tmp_path / f"model-{number}"
        assert main(["export", str(run.folder), "--site", f"site-{number}", "--out", str(out)]) == 0
        predictor = Predictor.load(out)
        assert set(predictor.inferences) == set(accuracy)
        if "prototype" not in accuracy:
            strange = predictor.predict(255 - data.test_inputs)
            assert {(one.nearest, one.distance, one.unknown) for one in strange} == {(None, None, False)}
        for by, wanted in accuracy.items():
            labels = [one.label for one in predictor.predict(data.test_inputs, by)]
            assert (np.array(labels) == data.test_labels).mean() == wanted


def test_the_command_line_says_what_python_says(tmp_path: Path, capsys: Printed) -> None:
    run = trained(tmp_path, algo="fedproto", local_epochs=3, dataset="digits", partition="iid")
    data = site(run, 1).data
    folder, out = write_images(tmp_path / "images", data.test_inputs), tmp_path / "model"
    assert main(["export", str(run.folder), "--site", "site-1", "--out", str(out)]) == 0
    capsys.readouterr()
    assert main(["predict", str(out), str(folder), "--json"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    known = Predictor.load(out).predict(data.test_inputs)
    assert [one["label"] for one in told] == [one.label for one in known]
    assert [one["file"] for one in told] == sorted(str(file) for file in folder.iterdir())
    assert [one["distance"] for one in told] == [one.distance for one in known]
    assert [one["unknown"] for one in told] == [one.unknown for one in known]
    assert 0 < sum(one["unknown"] for one in told) <= 0.05 * len(told)
    assert all(0 < one["probability"] <= 1 for one in told)
    assert main(["predict", str(out), str(folder / "0000.png")]) == 0
    assert known[0].name in capsys.readouterr().out
    assert main(["predict", str(out), *[str(folder / "0000.png")] * 2, "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1  # a file that is named twice
    (out / "model.onnx").touch()
    assert main(["export", str(run.folder), "--site", "site-0", "--out", str(out)]) == 0
    assert not (out / "model.onnx").exists()  # which was another model's
    assert main(["export", str(run.folder), "--site", "site-0", "--out", str(folder / "0000.png")]) == 1
    assert "protofl: this cannot work" in capsys.readouterr().err


def test_the_card_says_what_the_model_is(tmp_path: Path) -> None:
    run, out = trained(tmp_path, algo="fedtgp", models="htcnn8", local_epochs=2), tmp_path / "model"
    export = ["export", str(run.folder), "--site", "site-1", "--out", str(out)]
    assert main(export) == 0
    card = json.loads((out / CARD).read_text())
    facts = {"run": run.folder.name, "site": "site-1", "algorithm": "fedtgp", "round": 2, "arch": "htcnn-2"}
    facts |= {"input-shape": [3, 16, 16], "input-type": "uint8", "similarity": "l2"}
    facts |= {"classes": [str(digit) for digit in range(10)], "accuracy": run.summary["accuracy-of-clients"]["site-1"]}
    assert card | facts == card
    assert card["unknown-above"] > 0
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
    assert main([*export, "--unknown", "0"]) == 0
    assert "unknown" not in (out / "README.md").read_text()
    assert not any(one.unknown for one in Predictor.load(out).predict(255 - site(run, 1).data.test_inputs))


def test_a_run_of_separate_machines_says_where_its_models_are(tmp_path: Path, capsys: Printed) -> None:
    write_run(tmp_path / "runs" / "first", {"algo": "local"}, [{"north": {"head": 0.5}, "south": {"head": 0.5}}] * 2)
    assert main(["export", str(tmp_path / "runs" / "first")]) == 1
    said = capsys.readouterr().err
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
    data = site(run, 0).data
    assert np.mean([one.unknown for one in Predictor(model).predict(data.test_inputs)]) <= 0.05
    assert np.mean([one.unknown for one in Predictor(model).predict(255 - data.test_inputs)]) > 0.3


def test_what_cannot_work_is_said(tmp_path: Path, capsys: Printed) -> None:
    run = trained(tmp_path, algo="fedpcl")
    out = tmp_path / "model"
    for arguments, reason in (
        (["export", str(tmp_path)], "no trained models in it"),
        (["export", str(run.folder)], "choose with --site: site-0, site-1"),
        (["export", str(run.folder), "--site", "site-7"], "choose site-0, site-1"),
        (["export", str(run.folder), "--site", "site-0", "--unknown", "1"], "at least 0 and below 1"),
        (["export", str(run.folder), "--site", "site-0", "--out", str(out), "--onnx"], "frozen backbones"),
    ):
        assert main(arguments) == 1, arguments
        assert reason in capsys.readouterr().err, arguments
    assert not out.exists()
    assert main(["export", str(run.folder), "--site", "site-0", "--out", str(out)]) == 0
    for image, reason in (
        (tmp_path / "none.png", "there is no such file"),
        (run.folder, "no images in this folder"),
        (out / CARD, "is not a readable image"),
    ):
        assert main(["predict", str(out), str(image)]) == 1
        assert reason in capsys.readouterr().err
    image = write_images(tmp_path / "images", site(run, 0).data.test_inputs[:1])
    assert main(["predict", str(out), str(image), "--by", "head"]) == 1
    assert "by = 'head': this model predicts by prototype" in capsys.readouterr().err
    (out / WEIGHTS).write_bytes(b"nothing")
    assert main(["predict", str(out), str(image)]) == 1
    assert str(out / WEIGHTS) in capsys.readouterr().err
    with pytest.raises(ValueError, match="not uint8"):
        Predictor(TrainedModel.read(run.folder / "clients" / "site-0" / WEIGHTS)).predict(np.zeros((1, 1, 9, 9)))


def crafted(out: Path, changes: dict[str, Any]) -> None:
    """Write a model's file again, with other entries on its card; None removes one, and ``facts`` is all of it."""
    tensors, facts = read_tensors(out / WEIGHTS, torch.device("cpu"))
    card = json.loads(facts["card"]) | changes
    card = {name: value for name, value in card.items() if value is not None}
    write_tensors(out / WEIGHTS, tensors, facts | {"card": changes.get("facts") or json.dumps(card)})


CRAFTED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown network": ({"arch": "vgg"}, "arch is 'vgg', not one of"),
    "another network": ({"arch": "resnet10"}, "the weights are not of the network on the model's card"),
    "a huge one": ({"feature_dim": 10**7}, "its prototypes are not of the model on its card"),
    "a huge input": ({"input_shape": [3, 2048, 2048]}, "the weights are not of the network on the model's card"),
    "no network": ({"arch": None}, "its card is not one of a model (arch: Field required)"),
    "fewer classes": ({"classes": ["one"]}, "its prototypes are not of the model on its card"),
    "a class that forges a terminal": ({"classes": ["\x1b[2J"] * 10}, "classes = "),
    "a site that does": ({"site": "\x1b[2J"}, "site = "),
    "a number as text": ({"round": "3"}, "round = '3'"),
    "another way to predict": ({"inference": "oracle"}, "inference = 'oracle'"),
    "a file as a backbone": ({"backbones": ["file:small:/etc/passwd"]}, "asks for the backbone file:small:/etc/passwd"),
    "no JSON": ({"facts": "{"}, "its card is not one of a model"),
}


def test_a_strangers_model_gives_one_clear_error(tmp_path: Path, capsys: Printed) -> None:
    run = trained(tmp_path, algo="fedproto", models="cnn4")
    out = tmp_path / "model"
    assert main(["export", str(run.folder), "--site", "site-0", "--out", str(out)]) == 0
    image = write_images(tmp_path / "images", site(run, 0).data.test_inputs[:1])
    whole = (out / WEIGHTS).read_bytes()
    for name, (changes, said) in CRAFTED.items():
        crafted(out, changes)
        capsys.readouterr()
        assert main(["predict", str(out), str(image)]) == 1, name
        assert said in (told := capsys.readouterr().err), (name, told)
        assert "\x1b" not in told
        (out / WEIGHTS).write_bytes(whole)
    (out / CARD).write_text('{"unknown-above": [1]}')
    assert main(["predict", str(out), str(image)]) == 1
    assert f"{out / CARD} cannot be read" in capsys.readouterr().err


def test_class_scores_by_hand() -> None:
    distances = torch.tensor([[1.0, 2.0, 3.0]])
    assert class_scores(distances, torch.tensor([2, 0, 2]), 4).tolist() == [[-4.0, -math.inf, -1.0, -math.inf]]


def test_the_temperature_makes_probabilities_true() -> None:
    generator = torch.Generator().manual_seed(1)
    scores = -20 * torch.rand(20_000, 5, generator=generator)
    labels = torch.multinomial((scores / 7).softmax(1), 1, generator=generator)[:, 0]
    assert fit_temperature(scores, labels) == pytest.approx(7, rel=0.08)
    assert fit_temperature(torch.full((3, 2), -math.inf), torch.tensor([0, 1, 1])) == 1.0


def test_the_limit_of_the_unknown_by_hand() -> None:
    """n = 19: of 20 images, one may be above the largest of the others, a share of 5 %."""
    distances = torch.arange(1.0, 20.0)
    assert unknown_above(distances, 0.05) == 19.0
    assert unknown_above(distances, 0.10) == 18.0
    assert unknown_above(distances, 0.04) == math.inf
    assert unknown_above(torch.empty(0), 0.05) == math.inf
