"""From bytes to tensors: normalisation, samples without a label kept apart, changed images."""

import warnings

import numpy as np
import pytest
import torch

from client_app.learning.data import Augment, Samples, rotated, split_unlabelled, to_device
from client_app.learning.training import shuffled_batches
from protofl_common.config.options import SettingsError
from protofl_common.data import ClientData
from protofl_common.data.raw import normalised, statistics
from protofl_common.experiment.settings import Settings, default_run_config
from protofl_common.tasks import task_of
from tests.support.harness import run_config, run_federation

CPU = torch.device("cpu")


def some_data(labels):
    """Return a client's images of two channels, the same ones for training and for testing."""
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


def test_read_only_arrays_serve_without_a_warning_and_stay_as_they_are():
    """PyTorch warns of tensors that share the memory of such an array; here it is copied."""
    data = some_data([0, 1, 2])
    before = data.test_inputs.copy()
    data.test_inputs.flags.writeable = False
    data.test_labels.flags.writeable = False

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = to_device(data.test_inputs, data.test_labels, data, CPU)
    found.inputs.zero_()

    np.testing.assert_array_equal(data.test_inputs, before)


def test_samples_without_a_label_stand_apart_in_their_order_and_others_are_not_touched():
    """A label of -1 stands for none; samples that all have labels are passed on as they are."""
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


def some_signals():
    """Return 40 signals of two channels and five steps; the second channel is constant."""
    signals = np.random.default_rng(0).normal(3, 2, (40, 2, 5)).astype(np.float32)
    signals[:, 1] = 7
    return signals


def test_numbers_are_standardised_per_channel():
    """A constant channel counts as one of deviation 1."""
    signals = some_signals()

    mean, std = statistics(signals)
    found = normalised(signals, mean, std, CPU).numpy()

    assert std[1] == 1

    deviations = np.array([signals[:, 0].std(), 1]).reshape(1, 2, 1)
    wanted = (signals - signals.mean((0, 2), keepdims=True)) / deviations

    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_numbers_are_standardised_in_any_unit():
    """Fields of a heart in teslas are some 1e-13, and no constant."""
    signals = some_signals()
    tiny = signals * np.float32(1e-13)

    found = normalised(tiny, *statistics(tiny), CPU)[:, 0]

    wanted = normalised(signals, *statistics(signals), CPU)[:, 0]

    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    _, deviations = statistics(tiny)
    assert deviations[1] == 1  # of the second channel, which is constant


def test_tokens_stay_as_they_are():
    tokens = np.arange(6).reshape(2, 3)

    assert statistics(tokens) == ((), ())
    assert normalised(tokens, (), (), CPU).tolist() == [[0, 1, 2], [3, 4, 5]]


BLACK = torch.tensor([-1.5, -2.0]).view(-1, 1, 1)
"""What 0 becomes in each of two channels when pixels are normalised."""


def images(many, height=5, width=7):
    return torch.rand(many, 2, height, width, generator=torch.Generator().manual_seed(1))


def augmented(kinds, batch, seed=3):
    """Return the images of a batch as they are changed to train on: "flip", "rotate"."""
    return Augment(frozenset(kinds), BLACK)(batch, torch.Generator().manual_seed(seed))


def test_half_of_the_images_are_flipped():
    """Each of 400 images is flipped left to right, or is not."""
    before = images(400)

    after = augmented({"flip"}, before)

    flipped = 0
    for one, original in zip(after, before, strict=True):
        is_flipped = torch.equal(one, original.flip(2))
        assert is_flipped != torch.equal(one, original)
        flipped += is_flipped

    assert 160 < flipped < 240  # of 400: 200, and four deviations of 10


def test_the_generator_alone_says_how_images_are_changed():
    """Two batches with the seed 1 are changed alike, one with the seed 2 in another way."""
    before = images(30)

    both_changes = {"flip", "rotate"}
    once = augmented(both_changes, before, seed=1)
    again = augmented(both_changes, before, seed=1)
    other = augmented(both_changes, before, seed=2)

    assert torch.equal(once, again)
    assert not torch.equal(once, other)
    assert torch.equal(before, images(30))


@pytest.mark.parametrize("turns", [-1, 0, 1, 2])
def test_a_quarter_of_a_turn_moves_every_pixel_of_a_square(turns):
    before = images(3, 6, 6)
    angles = torch.full((3,), turns * torch.pi / 2)

    torch.testing.assert_close(rotated(before, angles), before.rot90(turns, (2, 3)))


def test_images_turn_by_thirty_degrees_at_most_with_black_corners():
    """Images of ones have a bar of fives from the middle to the right, which shows the angle."""
    before = torch.ones(300, 2, 21, 21)
    before[:, :, 10, 11:] = 5.0

    after = augmented({"rotate"}, before)

    is_old = after.isclose(torch.tensor(1.0)) | after.isclose(torch.tensor(5.0))

    # no pixel is mixed of others; what comes from outside is black
    assert bool((is_old | after.isclose(BLACK)).all())

    angles = []
    for image in after[:, 0]:
        from_middle = np.argwhere(image.numpy() > 4) - 10  # the bar's pixels: (down, right)
        end_of_bar = from_middle[np.abs(from_middle).max(1) > 5]
        down, right = end_of_bar.mean(0)
        angles.append(np.degrees(np.arctan2(down, right)))

    assert np.abs(angles).max() < 33  # 30, and what pixels cost
    assert min(angles) < -25
    assert max(angles) > 25
    assert len(np.unique(np.round(angles, 1))) > 20


def test_a_turned_image_is_not_stretched():
    """A line along the middle row of a wide image, turned by 30°, has slope 1/√3 in pixels."""
    wide = torch.zeros(1, 1, 41, 81)
    wide[0, 0, 20] = 1

    turned = rotated(wide, torch.tensor([-torch.pi / 6]))[0, 0]

    down, right = torch.nonzero(turned).T.double().numpy()

    assert np.polyfit(right, down, 1)[0] == pytest.approx(3**-0.5, abs=0.02)


def test_batches_to_train_on_are_changed_and_the_samples_stay():
    """An image of a batch is the sample of its row, or that flipped."""
    augment = Augment(frozenset({"flip"}), BLACK)
    samples = Samples(images(8), torch.arange(8), augment=augment)

    for inputs, labels, rows in shuffled_batches(samples, 4, torch.Generator().manual_seed(0)):
        assert torch.equal(labels, rows)
        for image, original in zip(inputs, samples.in_memory[rows], strict=True):
            assert torch.equal(image, original) or torch.equal(image, original.flip(2))

    assert torch.equal(samples.in_memory, images(8))


def test_unlabelled_samples_are_changed_as_the_others_are():
    augment = Augment(frozenset({"flip"}), BLACK)
    samples = Samples(images(2), torch.arange(2), images(1), augment)

    assert samples.with_unlabelled().augment is augment


def test_a_head_that_trains_on_features_sees_images_as_they_are(tmp_path):
    """FedRep's head trains on features of unchanged images, its body on images that are flipped.

    The accuracy of the first row is that of its head, and the losses are of the body.
    """
    first_rows = []
    for kind in ("flip", "none"):
        config = run_config(
            tmp_path / kind, algo="fedrep", rounds=1, train_samples=20, augment=kind
        )
        first_rows.append(run_federation(config, clients=1).rows[0])

    flipped, unchanged = first_rows

    assert flipped["accuracy"] == unchanged["accuracy"]
    assert flipped["losses"] != unchanged["losses"]


@pytest.mark.parametrize("frozen", [{"algo": "fedpcl"}, {"backbones": "glyphs"}])
def test_images_before_a_frozen_backbone_are_not_changed(frozen):
    """FedPCL has a frozen backbone unless ``backbones`` is "none"."""
    said = "augment = 'flip': frozen backbones see every image once, as it is"

    with pytest.raises(SettingsError, match=said):
        Settings.from_run_config(default_run_config() | {"augment": "flip"} | frozen)

    without = {"augment": "flip,rotate", "algo": "fedpcl", "backbones": "none"}
    Settings.from_run_config(default_run_config() | without)


def test_an_unknown_change_of_images_is_refused():
    with pytest.raises(SettingsError, match="augment = 'flop': choose one of none, flip, rotate"):
        Settings.from_run_config(default_run_config() | {"augment": "flop"})


def test_rows_of_a_table_are_not_flipped(tmp_path):
    table = run_config(tmp_path, dataset="wine", models="table3", partition="iid", augment="flip")
    said = r"augment = 'flip': only images take it; a sample is float32 \[13\]; set none"

    with pytest.raises(Exception, match=said):
        run_federation(table, clients=2)
