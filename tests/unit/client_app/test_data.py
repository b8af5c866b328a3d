"""From bytes to tensors: normalisation, samples without a label kept apart, changed images."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from client_app.learning.data import Augment, Samples, rotated, split_unlabelled, to_device
from client_app.learning.training import shuffled_batches
from protofl_common.config.options import SettingsError
from protofl_common.data import ClientData
from protofl_common.data.raw import normalised, statistics
from protofl_common.experiment.settings import Settings, default_run_config
from protofl_common.tasks import task_of
from tests.support.harness import run_config, run_federation

CPU = torch.device("cpu")


def some_data(labels: list[int]) -> ClientData:
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 2, 4, 4), dtype=np.uint8)
    numbers = np.array(labels)
    return ClientData(
        train_inputs=images,
        train_labels=numbers,
        test_inputs=images,
        test_labels=numbers,
        validation_inputs=images[:0],
        validation_labels=numbers[:0],
        classes=("a", "b", "c"),
        domain="",
        mean=(0.2, 0.5),
        std=(0.3, 0.25),
        fill=(),
        columns=(),
        found=len(labels),
    )


def test_bytes_become_normalised_floats() -> None:
    data = some_data([0, 2, 1])
    found = to_device(data.train_inputs, data.train_labels, data, CPU)
    mean, std = np.array([0.2, 0.5]).reshape(1, 2, 1, 1), np.array([0.3, 0.25]).reshape(1, 2, 1, 1)
    np.testing.assert_allclose(
        found.inputs.numpy(), (data.train_inputs / 255 - mean) / std, rtol=1e-5, atol=1e-6
    )
    assert found.inputs.dtype == torch.float32
    assert found.labels.tolist() == [0, 2, 1]
    assert found.unlabelled is None


def test_read_only_arrays_serve_without_a_warning_and_stay_as_they_are() -> None:
    data = some_data([0, 1, 2])
    before = data.test_inputs.copy()
    data.test_inputs.flags.writeable = data.test_labels.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = to_device(data.test_inputs, data.test_labels, data, CPU)
    found.inputs.zero_()
    np.testing.assert_array_equal(data.test_inputs, before)


def test_samples_without_a_label_stand_apart_in_their_order_and_others_are_not_touched() -> None:
    data = some_data([1, -1, 0, -1, 2])
    whole = to_device(data.train_inputs, np.zeros(5, np.int64), data, CPU).inputs
    found = to_device(data.train_inputs, data.train_labels, data, CPU)
    assert len(found) == 3
    assert found.labels.tolist() == [1, 0, 2]
    assert torch.equal(found.inputs, whole[[0, 2, 4]])
    assert torch.equal(found.unlabelled, whole[[1, 3]])
    together = found.with_unlabelled()
    assert together.labels.tolist() == [1, 0, 2, -1, -1]
    assert torch.equal(together.inputs, whole[[0, 2, 4, 1, 3]])
    assert together.unlabelled is None
    images, labels = torch.rand(3, 7), torch.tensor([0, 0, 1])
    found = split_unlabelled(task_of("ab"), images, labels)
    assert found.inputs is images
    assert found.labels is labels
    assert found.with_unlabelled() is found


def test_numbers_are_standardised_per_channel_and_tokens_stay_as_they_are() -> None:
    signal = np.random.default_rng(0).normal(3, 2, (40, 2, 5)).astype(np.float32)
    signal[:, 1] = 7  # constant
    mean, std = statistics(signal)
    assert std[1] == 1
    found = normalised(signal, mean, std, CPU).numpy()
    expected = (signal - signal.mean((0, 2), keepdims=True)) / np.array(
        [signal[:, 0].std(), 1]
    ).reshape(1, 2, 1)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    tiny = signal * np.float32(1e-13)  # teslas
    np.testing.assert_allclose(
        normalised(tiny, *statistics(tiny), CPU)[:, 0], expected[:, 0], atol=1e-5
    )
    assert statistics(tiny)[1][1] == 1
    tokens = np.arange(6).reshape(2, 3)
    assert statistics(tokens) == ((), ())
    assert normalised(tokens, (), (), CPU).tolist() == [[0, 1, 2], [3, 4, 5]]


BLACK = torch.tensor([-1.5, -2.0]).view(-1, 1, 1)


def images(many: int, height: int = 5, width: int = 7) -> Tensor:
    return torch.rand(many, 2, height, width, generator=torch.Generator().manual_seed(1))


def augmented(kinds: set[str], batch: Tensor, seed: int = 3) -> Tensor:
    return Augment(frozenset(kinds), BLACK)(batch, torch.Generator().manual_seed(seed))


def test_half_of_the_images_are_flipped_as_the_generator_draws() -> None:
    before = images(400)
    after = augmented({"flip"}, before)
    flipped = torch.tensor(
        [bool(torch.equal(one, other.flip(2))) for one, other in zip(after, before, strict=True)]
    )
    same = torch.tensor(
        [bool(torch.equal(one, other)) for one, other in zip(after, before, strict=True)]
    )
    assert bool((flipped ^ same).all())
    assert 160 < int(flipped.sum()) < 240
    before = images(30)
    once, again, other = (augmented({"flip", "rotate"}, before, seed) for seed in (1, 1, 2))
    assert torch.equal(once, again)
    assert not torch.equal(once, other)
    assert torch.equal(before, images(30))


@pytest.mark.parametrize("turns", [-1, 0, 1, 2])
def test_a_quarter_of_a_turn_moves_every_pixel_of_a_square(turns: int) -> None:
    before = images(3, 6, 6)
    torch.testing.assert_close(
        rotated(before, torch.full((3,), turns * torch.pi / 2)), before.rot90(turns, (2, 3))
    )


def test_images_turn_by_thirty_degrees_at_most_with_black_corners_and_are_not_stretched() -> None:
    before = torch.ones(300, 2, 21, 21)
    before[:, :, 10, 11:] = 5.0
    after = augmented({"rotate"}, before)
    assert bool(
        (
            (after.isclose(torch.tensor(1.0)) | after.isclose(torch.tensor(5.0)))
            | after.isclose(BLACK)
        ).all()
    )
    bars = [np.argwhere(one.numpy() > 4) - 10 for one in after[:, 0]]
    angles = np.degrees([np.arctan2(*bar[np.abs(bar).max(1) > 5].mean(0)) for bar in bars])
    assert np.abs(angles).max() < 33
    assert angles.min() < -25
    assert angles.max() > 25
    assert len(np.unique(angles.round(1))) > 20
    # a line along the middle row of a wide image, turned by 30 degrees, has slope 1/√3 in pixels
    wide = torch.zeros(1, 1, 41, 81)
    wide[0, 0, 20] = 1
    down, right = (
        torch.nonzero(rotated(wide, torch.tensor([-torch.pi / 6]))[0, 0]).T.double().numpy()
    )
    assert np.polyfit(right, down, 1)[0] == pytest.approx(3**-0.5, abs=0.02)


def test_batches_to_train_on_are_changed_and_the_samples_stay() -> None:
    samples = Samples(images(8), torch.arange(8), augment=Augment(frozenset({"flip"}), BLACK))
    for inputs, labels, rows in shuffled_batches(samples, 4, torch.Generator().manual_seed(0)):
        assert torch.equal(labels, rows)
        kept = samples.in_memory[rows]
        assert all(
            torch.equal(a, b) or torch.equal(a, b.flip(2))
            for a, b in zip(inputs, kept, strict=True)
        )
    assert torch.equal(samples.in_memory, images(8))
    assert (
        Samples(images(2), torch.arange(2), images(1), samples.augment).with_unlabelled().augment
        is samples.augment
    )


def test_a_head_that_trains_on_features_sees_images_as_they_are(tmp_path: Path) -> None:
    small: dict[str, Any] = {"algo": "fedrep", "rounds": 1, "train_samples": 20}
    configs = [run_config(tmp_path / kind, augment=kind, **small) for kind in ("flip", "none")]
    changed, plain = (run_federation(config, clients=1) for config in configs)
    assert [row["accuracy"] for row in changed.rows][:1] == [row["accuracy"] for row in plain.rows][
        :1
    ]  # the head's
    assert changed.rows[0]["losses"] != plain.rows[0]["losses"]


def test_only_images_of_networks_that_see_them_take_it(tmp_path: Path) -> None:
    for changes in ({"algo": "fedpcl"}, {"backbones": "glyphs"}):
        with pytest.raises(
            SettingsError, match="augment = 'flip': frozen backbones see every image once, as it is"
        ):
            Settings.from_run_config(default_run_config() | {"augment": "flip"} | changes)
    Settings.from_run_config(
        default_run_config() | {"augment": "flip,rotate", "algo": "fedpcl", "backbones": "none"}
    )
    with pytest.raises(SettingsError, match="augment = 'flop': choose one of none, flip, rotate"):
        Settings.from_run_config(default_run_config() | {"augment": "flop"})
    table = run_config(tmp_path, dataset="wine", models="table3", partition="iid", augment="flip")
    with pytest.raises(
        Exception,
        match=r"augment = 'flip': only images take it; a sample is float32 \[13\]; set none",
    ):
        run_federation(table, clients=2)
