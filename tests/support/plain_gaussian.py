"""What the scripts of Gaussian heads, of one label a sample and of several, have in common."""

import numpy as np
from numpy.typing import NDArray
from torch import nn

from protofl_common.models.trained import TrainedModel
from tests.support.harness import Outcome
from tests.support.plain import server_state_left

Numbers = NDArray[np.float64]


def oas(covariance: Numbers, n: float) -> Numbers:
    """Return the oracle approximating shrinkage of a covariance Σ [p, p] of n samples.

    (1 − ρ) Σ + ρ (tr Σ / p) I with ρ = min(1, ((1 − 2/p) tr Σ² + tr² Σ)
    / ((n + 1 − 2/p) (tr Σ² − tr² Σ / p))), Chen et al. 2010, Eq. 23. To this the system adds
    10⁻⁹ + 10⁻⁶ tr Σ / p on the diagonal, so that it can be inverted.
    """
    p = len(covariance)
    trace = np.trace(covariance)
    trace_of_square = (covariance**2).sum()  # tr Σ², since Σ is symmetric
    numerator = (1 - 2 / p) * trace_of_square + trace**2
    denominator = (n + 1 - 2 / p) * (trace_of_square - trace**2 / p)
    rho = min(1, numerator / denominator)
    mean_variance = trace / p
    ridge = rho * mean_variance + 1e-9 + 1e-6 * mean_variance
    return (1 - rho) * covariance + ridge * np.eye(p)


def moments_of(outcome: Outcome) -> dict[str, Numbers]:
    """Return the merged moments in the run's last checkpoint, by their name."""
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
    """No number is off by more than ``tolerance`` times the largest finite wanted number.

    A wanted infinity must be found as one.
    """
    largest = np.abs(wanted[np.isfinite(wanted)]).max()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance * largest)
