"""Weights as JSON: what is shipped, the round trip, and files that are wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from protofl_common.backbones.load import WEIGHTS
from protofl_common.backbones.network import WIDTH, BackboneError, SmallResNet
from protofl_common.backbones.weightfile import StoredWeights, read_weights
from protofl_common.config.backbones import EMBEDDED
from tests.bench.pretraining.weights import write_weights

LARGEST = 500 * 1024
"""Bytes; pre-commit's check-added-large-files refuses more."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    write_weights(tmp_path / "own.json", StoredWeights(SmallResNet().state_dict(), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)))
    return tmp_path / "own.json"


@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded_weights_are_sound_and_small(name: str) -> None:
    weights = read_weights(WEIGHTS / f"{name}.json")
    assert (WEIGHTS / f"{name}.json").stat().st_size < LARGEST
    assert weights.made["held-out accuracy"][0] > 0.5
    assert len(weights.sha256) == 64


def test_embedded_weights_travel_with_the_app() -> None:
    suffixes = {file.suffix for file in WEIGHTS.parent.rglob("*") if file.is_file() and "__pycache__" not in file.parts}
    assert suffixes <= {".py", ".json"}


def test_round_trip(file: Path) -> None:
    torch.manual_seed(0)
    network = SmallResNet()
    read = read_weights(file)
    assert (read.mean, read.std, read.size) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), 64)
    for name, value in network.state_dict().items():
        if "num_batches" not in name:
            torch.testing.assert_close(read.state[name], value, rtol=1e-3, atol=1e-6)
    assert network(torch.zeros(2, 3, 64, 64)).shape == (2, WIDTH)


def test_writing_twice_gives_the_same_bytes(file: Path) -> None:
    again = file.with_name("again.json")
    write_weights(again, read_weights(file))
    assert again.read_bytes() == file.read_bytes()


def _flipped(content: dict[str, Any]) -> None:
    data = content["tensors"]["stem.0.weight"]["data"]
    content["tensors"]["stem.0.weight"]["data"] = ("B" if data[0] == "A" else "A") + data[1:]


def _reshaped(content: dict[str, Any]) -> None:
    content["tensors"]["stem.0.weight"]["shape"] = [3, 24, 3, 3]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_flipped, "damaged, its checksum is"),
        (_reshaped, "damaged, its checksum is"),
        (lambda content: content["tensors"].popitem(), "damaged, its checksum is"),
        (lambda content: content.update(format=2), "format 2 of SmallResNet is unknown"),
        (lambda content: content.update(architecture="Other"), "format 1 of Other is unknown"),
        (lambda content: content.pop("sha256"), "not a file of backbone weights"),
        (lambda content: content.update(mean=[0.5]), "not a file of backbone weights"),
        (lambda content: content["tensors"]["stem.0.weight"].update(dtype="int64"), "not a file of backbone weights"),
    ],
)
def test_wrong_contents_are_refused(file: Path, change: Callable[[dict[str, Any]], None], words: str) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    with pytest.raises(BackboneError, match=words) as error:
        read_weights(file)
    assert str(file) in str(error.value)


@pytest.mark.parametrize("content", ["", "[]", "{}", "7", '{"format": 1}', '{"tensors": '])
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(BackboneError, match="not a file of backbone weights"):
        read_weights(tmp_path / "x.json")


def test_missing_and_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BackboneError, match="cannot be read"):
        read_weights(tmp_path / "missing.json")
    (tmp_path / "x.json").write_bytes(b"\x80\x04\xff")
    with pytest.raises(BackboneError, match="not a file of backbone weights"):
        read_weights(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.update({"stem.0.weight": torch.zeros(24, 1, 3, 3)}), r"has shape \(24, 1, 3, 3\)"),
        (lambda state: state.pop("last.1.bias"), "last.1.bias has shape None"),
        (lambda state: state.update(more=torch.zeros(1)), "more has shape"),
        (lambda state: state["last.1.bias"].fill_(float("nan")), "last.1.bias holds values that are not finite"),
        (lambda state: state["last.1.running_var"].fill_(-1), "last.1.running_var holds values"),
    ],
)
def test_other_networks_are_refused(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], words: str
) -> None:
    state = SmallResNet().state_dict()
    change(state)
    write_weights(tmp_path / "x.json", StoredWeights(state, (0.5,) * 3, (0.5,) * 3))
    with pytest.raises(BackboneError, match=words):
        read_weights(tmp_path / "x.json")
