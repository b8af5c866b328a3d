"""From bytes to tensors: normalisation, and samples without a label kept apart."""

import warnings

import numpy as np
import torch

from client_app.data import split_unlabelled, to_device
from protofl_common.data import ClientData
from protofl_common.data.raw import normalised, statistics

CPU = torch.device("cpu")


def some_data(labels: list[int]) -> ClientData:
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 2, 4, 4), dtype=np.uint8)
    numbers = np.array(labels)
    return ClientData(images, numbers, images, numbers, images[:0], numbers[:0], ("a", "b", "c"), "", (0.2, 0.5),
        (0.3, 0.25), (), (), len(labels))  # fmt: skip


def test_bytes_become_normalised_floats() -> None:
    data = some_data([0, 2, 1])
    found = to_device(data.train_inputs, data.train_labels, data, CPU)
    mean, std = np.array([0.2, 0.5]).reshape(1, 2, 1, 1), np.array([0.3, 0.25]).reshape(1, 2, 1, 1)
    np.testing.assert_allclose(found.inputs.numpy(), (data.train_inputs / 255 - mean) / std, rtol=1e-5, atol=1e-6)
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
    found = split_unlabelled(images, labels)
    assert found.inputs is images
    assert found.labels is labels
    assert found.with_unlabelled() is found


def test_numbers_are_standardised_per_channel_and_tokens_stay_as_they_are() -> None:
    signal = np.random.default_rng(0).normal(3, 2, (40, 2, 5)).astype(np.float32)
    signal[:, 1] = 7  # constant
    mean, std = statistics(signal)
    assert std[1] == 1
    found = normalised(signal, mean, std, CPU).numpy()
    expected = (signal - signal.mean((0, 2), keepdims=True)) / np.array([signal[:, 0].std(), 1]).reshape(1, 2, 1)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    tokens = np.arange(6).reshape(2, 3)
    assert statistics(tokens) == ((), ())
    assert normalised(tokens, (), (), CPU).tolist() == [[0, 1, 2], [3, 4, 5]]
