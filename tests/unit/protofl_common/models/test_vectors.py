"""Networks for tables, signals and texts: shapes, learning, padding, and what they refuse."""

import pytest
import torch
from torch import Tensor

from protofl_common.config.architectures import GROUPS, VOCABULARY
from protofl_common.config.options import SettingsError
from protofl_common.models.build import build_model, check_model
from protofl_common.models.split import SplitModel
from tests.support.models import assert_it_learns

DIM, CLASSES = 6, 3
SHAPES = {"table3": (13,), "signal3": (4, 20), "text3": (9,)}
CASES = [(arch, shape) for group, shape in SHAPES.items() for arch in GROUPS[group]]


def build(arch: str, shape: tuple[int, ...]) -> SplitModel:
    return build_model(arch, input_shape=shape, num_classes=CLASSES, feature_dim=DIM, seed=1)


def samples(arch: str, shape: tuple[int, ...], count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if arch.startswith("text"):
        return torch.randint(1, VOCABULARY, (count, *shape), generator=generator)
    return torch.randn(count, *shape, generator=generator)


@pytest.mark.parametrize(("arch", "shape"), CASES)
def test_they_learn_and_every_weight_moves(arch: str, shape: tuple[int, ...]) -> None:
    model, x = build(arch, shape), samples(arch, shape, 12)
    assert model.body(x).shape == (12, DIM)
    assert_it_learns(model, x, lr=0.05, steps=10)


@pytest.mark.parametrize("arch", GROUPS["text3"])
def test_texts_of_any_length_and_tokens_of_any_size_serve(arch: str) -> None:
    body = build(arch, (9,)).body.eval()
    short = torch.tensor([[5, 7, 0, 0]])
    assert body(short).shape == (1, DIM)
    assert torch.equal(body(short), body(short + (VOCABULARY - 1) * (short > 0)))


def test_padding_changes_no_mean() -> None:
    body = build("text-bag", (9,)).body.eval()
    torch.testing.assert_close(body(torch.tensor([[5, 7]])), body(torch.tensor([[5, 7, 0, 0, 0]])))
    assert torch.isfinite(body(torch.zeros(1, 4, dtype=torch.int64))).all()


@pytest.mark.parametrize(
    ("arch", "shape", "said"),
    [
        ("signal-cnn", (30,), r"'signal-cnn' is for signals \[channels, steps\].*\[30\].*table3"),
        ("text-gru", (3, 28, 28), r"'text-gru' is for texts \[tokens\].*small3"),
        ("cnn4", (4, 20), r"'cnn4' is for square images.*\[4, 20\].*signal3"),
    ],
)
def test_inputs_of_another_kind_are_refused(arch: str, shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build(arch, shape)


def test_inputs_of_another_type_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"arch = 'text-bag': inputs float32 \[2, 9\] do not fit .*text3 for texts"):
        check_model(build("text-bag", (9,)), "text-bag", torch.rand(2, 9), DIM)
    with pytest.raises(SettingsError, match=r"arch = 'mlp-1': inputs int64 \[2, 9\] do not fit"):
        check_model(build("mlp-1", (9,)), "mlp-1", torch.ones(2, 9, dtype=torch.int64), DIM)
