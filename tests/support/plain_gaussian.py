"""What the scripts of Gaussian heads, of one label a sample and of several, have in common."""

import numpy as np
from numpy.typing import NDArray
from torch import nn

from protofl_common.models.trained import TrainedModel
from tests.support.harness import Outcome
from tests.support.plain import server_state_left

Numbers = NDArray[np.float64]


def oas(covariance: Numbers, n: float) -> Numbers:
    """Chen et al. 2010, Eq. 23, and a millionth of the mean variance."""
    p = len(covariance)
    trace = np.trace(covariance)
    squares = (covariance**2).sum()
    above = (1 - 2 / p) * squares + trace**2
    below = (n + 1 - 2 / p) * (squares - trace**2 / p)
    rho = min(1, above / below)
    mean_variance = trace / p
    ridge = rho * mean_variance + 1e-9 + 1e-6 * mean_variance
    return (1 - rho) * covariance + ridge * np.eye(p)


def moments_of(outcome: Outcome) -> dict[str, Numbers]:
    """The merged moments in the run's last checkpoint."""
    moments = {}
    for name, value in server_state_left(outcome).items():
        if name.startswith("moments/"):
            moments[name.removeprefix("moments/")] = value.numpy()
    return moments


def head_left(outcome: Outcome) -> nn.Module:
    """The head of the model that the first client leaves, in float64."""
    file = outcome.folder / "clients" / "site-0" / "model.safetensors"
    return TrainedModel.read(file).build().double()


def assert_within(found: Numbers, wanted: Numbers, tolerance: float) -> None:
    """Relative to the largest of the wanted numbers."""
    largest = np.abs(wanted[np.isfinite(wanted)]).max()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance * largest)
