"""What somebody does who has just cloned this: run, look, compare, take a model out, and predict with it."""

import json
import os
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from protofl_common.data import open_client_data
from protofl_common.experiment.settings import Settings, default_run_config
from tests.support.browser import CHROMIUM, chromium
from tests.support.processes import BIN, output_of

pytestmark = pytest.mark.system
CLIENTS = 3


def command(*words: str) -> str:
    with tempfile.TemporaryDirectory(prefix="n-", dir="/tmp", ignore_cleanup_errors=True) as short:
        env = os.environ | {"TMPDIR": short, "PATH": f"{BIN}:{os.environ['PATH']}"}
        return output_of(words, env)


def test_make_run_shows_prototypes_ahead_of_fedavg_and_of_training_alone(tmp_path: Path) -> None:
    make = ("make", "-o", f"{BIN}/.installed", "run", f"VENV={sys.prefix}")
    lines = command(*make, "--dry-run").splitlines()  # below another make there are more
    assert ["run", "--recipe", "first-run"] in [line.split()[1:] for line in lines]
    said = command(*make, f"CONFIG=--recipe first-run out-dir={tmp_path} run-name=first")
    found = re.search(
        r"^result: alone ([\d.]+) %, FedAvg ([\d.]+) %, FedProto over 3 .* averaging ([\d.]+) %;", said, re.M
    )
    assert found, said
    alone, fedavg, prototypes = map(float, found.groups())
    assert prototypes > max(alone + 20, fedavg)
    assert not re.search(r"INFO|WARNING|Traceback|pid=", said)
    assert "samples: 2,500 found · 300 for training (train-samples = 30 a client) · 2,200 for testing · none" in said
    assert found[0].partition(": ")[2] in (tmp_path / "first" / "report.html").read_text(encoding="utf-8")


@pytest.mark.long  # the README's own commands do much the same in every gate
def test_run_look_compare_export_predict(tmp_path: Path) -> None:
    runs, model, image = tmp_path / "runs", tmp_path / "model", tmp_path / "seven.png"
    where = f"out-dir={runs} rounds=4 local-epochs=5 partition=iid train-samples=200"
    ready = f"{BIN}/.installed"  # the tests' own environment is not installed again
    make = ("make", "-o", ready, "run", f"VENV={sys.prefix}", f"CLIENTS={CLIENTS}", f"CONFIG={where} run-name=first")
    assert "results: " in command(*make)
    command("protofl", "run", "algo=local", *where.split(), "run-name=second", "--clients", str(CLIENTS))

    page = (runs / "first" / "report.html").read_text(encoding="utf-8")
    assert "FedProto" in page
    assert "http" not in page.replace("http://www.w3.org/", "")

    if CHROMIUM is not None:
        picture = tmp_path / "page.png"
        chromium(f"--screenshot={picture}", "--window-size=1280,2000", (runs / "first" / "report.html").as_uri())
        with Image.open(picture) as image_of_page:
            assert len(image_of_page.convert("L").getcolors() or ()) > 20

    compared = command("protofl", "compare", str(runs / "first"), str(runs / "second"))
    assert "FedProto" in compared
    assert "Local" in compared

    said = command("protofl", "export", str(runs / "first"), "--site", "site-1", "--out", str(model))
    assert f"protofl predict {model}" in said

    settings = Settings.from_run_config(default_run_config() | {"partition": "iid", "train-samples": 200})
    data = open_client_data(settings.data, seed=42, partition=1, num_partitions=CLIENTS)
    Image.fromarray(data.test_inputs[0].transpose(1, 2, 0)).save(image)
    (line,) = command("protofl", "predict", str(model), str(image), "--json").splitlines()
    told = json.loads(line)
    assert told["file"] == str(image)
    assert told["name"] in data.classes
    assert 0 < told["probability"] <= 1

    folder = tmp_path / "images"
    folder.mkdir()
    for index, pixels in enumerate(data.test_inputs):
        Image.fromarray(pixels.transpose(1, 2, 0)).save(folder / f"{index:05d}.png")
    lines = command("protofl", "predict", str(model), str(folder), "--json").splitlines()
    right = np.array([json.loads(line)["label"] for line in lines]) == data.test_labels
    card = json.loads((model / "model.json").read_text())
    assert right.mean() == card["accuracy"][card["inference"]] > 0.2
    assert 0 < np.mean([json.loads(line)["unknown"] for line in lines]) <= 0.05
