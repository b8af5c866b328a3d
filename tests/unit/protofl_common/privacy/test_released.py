"""What may leave under differential privacy: arrays known by content, and what is made of them."""

import numpy as np
import pytest
import torch
from torch import nn

from protofl_common.config.options import SettingsError
from protofl_common.maths.prototypes import class_means
from protofl_common.privacy.release import (
    large_counts,
    large_enough,
    noised_prototypes,
    private_class_means,
)
from protofl_common.privacy.released import Released

NOT_COVERED = "dp = 'sample': fedproto makes use of training data that the privacy ledger does not"
FEATURES = torch.arange(24.0).reshape(12, 2) / 9
LABELS = torch.arange(12) % 3


def noisy():
    """Return class means with noise, the same ones at every call."""
    draw = np.random.default_rng(0)
    return private_class_means(FEATURES, LABELS, 3, clip=1.0, noise=0.01, draw=draw)


@pytest.fixture
def released():
    return Released("fedproto", "sample")


def test_an_array_is_known_by_its_content(released):
    """Type and shape belong to the content; names and containers do not."""
    module = nn.Linear(3, 2)
    released.add([noisy(), {"counts": torch.tensor([3, 0])}, module])

    assert released.covers([noisy(), noisy().only(torch.tensor([0, 1, 2])), module.state_dict()])
    assert released.covers({"weight": module.weight.detach().clone()})
    exact = class_means(FEATURES, LABELS, 3)
    of_another_type = noisy().means.double()
    of_another_shape = torch.tensor([[3, 0]])
    for array in (exact, of_another_type, of_another_shape):
        assert not released.covers(array)

    module.bias.data[1] += 1e-6

    assert not released.covers(module)


def test_what_is_computed_from_released_arrays_alone_is_released(released):
    """``post_processed`` calls a function of released arrays, and adds what it returns."""
    released.add([noisy(), torch.tensor([3, 9])])
    of_two_samples = released.post_processed(large_enough, noisy(), 2)
    with_more_noise = released.post_processed(
        noised_prototypes, of_two_samples, "gaussian 0.1 0", 1
    )

    assert released.covers(with_more_noise)
    assert not torch.equal(with_more_noise.means, noisy().means)

    of_five_samples = released.post_processed(large_counts, torch.tensor([3, 9]), 5)
    assert of_five_samples.tolist() == [0, 9]
    assert released.covers(torch.tensor([0, 9]))


def test_post_processing_of_anything_else_is_refused(released):
    """Exact means, a function that may know more, and an unknown container are refused."""
    exact = class_means(FEATURES, LABELS, 3)
    released.add(noisy())

    with pytest.raises(SettingsError, match=NOT_COVERED):
        released.post_processed(large_enough, exact, 2)
    for function in (lambda prototypes: exact, exact.only):
        with pytest.raises(TypeError, match="is no function of a module, so it may know more"):
            released.post_processed(function, noisy())
    with pytest.raises(TypeError, match="ndarray: nobody knows here which arrays are in it"):
        released.post_processed(large_counts, np.ones(3), 2)


def test_no_more_is_used_than_was_charged(released):
    """No table, one step and two evaluations are charged; one more of each is refused."""
    charged = {"table": 0, "step": 1, "evaluation": 2}
    released.allow("step", 1)
    released.allow("evaluation", 2)

    for kind, times in charged.items():
        for _ in range(times):
            released.use(kind)
        with pytest.raises(SettingsError, match=NOT_COVERED):
            released.use(kind)


def test_an_entry_that_is_not_released_is_named(released):
    """Prototypes were released, and weights were not."""
    released.add(noisy())
    released.check_entries({"prototypes": noisy()})

    with pytest.raises(
        SettingsError, match="fedproto sends weights that the privacy ledger does not cover"
    ):
        released.check_entries({"prototypes": noisy(), "weights": {"bias": torch.zeros(2)}})
