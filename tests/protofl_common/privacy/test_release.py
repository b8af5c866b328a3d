"""Small classes are left out, small clusters merged; the papers' noise has the papers' size."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from protofl_common.datasets.raw import DataError
from protofl_common.privacy.release import large_enough, noised, noised_images
from protofl_common.prototypes import Prototypes

CLUSTERS = Prototypes(
    torch.tensor([[1.0], [4.0], [6.0], [9.0], [2.0], [8.0]]),
    torch.tensor([0, 0, 0, 1, 2, 2]),
    torch.tensor([5, 1, 3, 2, 7, 1]),
)


def test_small_clusters_of_a_class_become_one_and_a_small_class_goes() -> None:
    found = large_enough(CLUSTERS, 4)
    assert found.labels.tolist() == [0, 0, 2]
    assert found.counts is not None
    assert found.counts.tolist() == [5, 4, 7]  # 1 + 3 merged; of class 2 the cluster of one is left out
    assert found.means.flatten().tolist() == [1.0, (4 + 3 * 6) / 4, 2.0]


def test_what_is_large_enough_stays_as_it_is() -> None:
    assert large_enough(CLUSTERS, 1) is CLUSTERS


@pytest.mark.parametrize(("noise", "deviation"), [("gaussian 0.05 0.1", 0.05), ("laplace 0.05 0.1", 0.05 * 2**0.5)])
def test_noise_shrinks_by_p_and_has_scale_s(noise: str, deviation: float) -> None:
    found = noised(torch.ones(200, 100), noise, seed=1)
    assert found.dtype == torch.float32
    assert float(found.mean()) == pytest.approx(0.9, abs=0.003)
    assert float(found.std()) == pytest.approx(deviation, rel=0.03)
    assert torch.equal(found, noised(torch.ones(200, 100), noise, seed=1))


def test_noised_images_are_bytes_about_middle_grey() -> None:
    images = np.full((50, 1, 20, 20), 191, dtype=np.uint8)
    found = noised_images(images, "gaussian 0.2 0.5", seed=1)
    assert (found.dtype, found.shape) == (images.dtype, images.shape)
    assert float(found.mean()) == pytest.approx(127.5 + 0.5 * 63.5, abs=1)
    assert float(found.std()) == pytest.approx(0.2 * 127.5, rel=0.05)
    with pytest.raises(DataError, match=r"image-noise = 'gaussian 0.2 0.5': only images"):
        noised_images(np.zeros((3, 4), np.float32), "gaussian 0.2 0.5", seed=1)
