"""Weights as JSON: what is shipped, the round trip, and files that are wrong."""

import json

import pytest
import torch

from protofl_common.backbones.load import (
    WEIGHTS,
    WIDTH,
    BackboneError,
    SmallResNet,
    load_backbone,
)
from protofl_common.config.backbones import EMBEDDED
from tests.unit.protofl_common.backbones.conftest import write_weights

LARGEST = 500 * 1024
"""Bytes; pre-commit's check-added-large-files refuses more."""


@pytest.fixture
def file(tmp_path):
    """A file of the weights of a SmallResNet, with a mean and deviation for each channel."""
    torch.manual_seed(0)
    write_weights(
        tmp_path / "own.json", SmallResNet().state_dict(), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    )
    return tmp_path / "own.json"


def load_weight_file(file):
    load_backbone.cache_clear()
    return load_backbone(f"file:small:{file}", torch.device("cpu"))


@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded_weights_are_small_and_say_how_good_they_are(name):
    file = WEIGHTS / f"{name}.json"
    assert file.stat().st_size < LARGEST
    accuracies = json.loads(file.read_text())["made"]["held-out accuracy"]  # of each of its tasks
    assert accuracies[0] > 0.5


def test_round_trip(file):
    """The weights are rounded to float16, and their file is the same when it is written again."""
    torch.manual_seed(0)
    network, backbone = SmallResNet(), load_weight_file(file)

    assert (backbone.mean, backbone.std, backbone.size, backbone.width) == (
        (0.1, 0.2, 0.3),
        (0.4, 0.5, 0.6),
        64,
        WIDTH,
    )
    assert load_backbone(f"file:small@32:{file}", torch.device("cpu")).size == 32

    stored = backbone.network.state_dict()
    for name, value in network.state_dict().items():
        torch.testing.assert_close(stored[name], value, rtol=1e-3, atol=1e-6)

    again = file.with_name("again.json")
    write_weights(
        again, {k: v.contiguous() for k, v in stored.items()}, backbone.mean, backbone.std
    )

    # what was rounded to float16 once is not rounded again
    assert again.read_bytes() == file.read_bytes()


@pytest.mark.parametrize("change", [
    lambda content: content.update(weights="B" + content["weights"][1:]),  # another first letter
    lambda content: content.pop("weights"),
    lambda content: content.update(weights="no base64"),
    lambda content: content.update(mean=[0.5]),
    lambda content: content.update(std=[0.5, 0.5, 0]),
    lambda content: content.update(size="large"),
])  # fmt: skip
def test_wrong_contents_are_refused(file, change):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))

    with pytest.raises(BackboneError, match=r"own\.json: cannot be had"):
        load_weight_file(file)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b"7", b'{"weights": ', b"\x80\x04\xff", None]
)
def test_other_files_are_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(BackboneError, match=r"x\.json: cannot be had"):
        load_weight_file(tmp_path / "x.json")


@pytest.mark.parametrize(("change", "words"), [
    (
        lambda state: state.update({"stem.0.weight": torch.zeros(24, 1, 3, 3)}),
        "size mismatch for stem.0.weight",
    ),
    (lambda state: state.pop("last.1.bias"), "Missing key.*last.1.bias"),
    (lambda state: state.update(more=torch.zeros(1)), "Unexpected key.*more"),
    (lambda state: state["last.1.bias"].fill_(float("nan")), "features that are not finite"),
    (lambda state: state["last.1.running_var"].fill_(-1), "features that are not finite"),
])  # fmt: skip
def test_no_other_network_loads(tmp_path, change, words):
    """A changed state dict is named by what is wrong, NaN by the features that it gives."""
    state = SmallResNet().state_dict()
    change(state)
    write_weights(tmp_path / "x.json", state)

    with pytest.raises(BackboneError, match=words):
        load_weight_file(tmp_path / "x.json")
