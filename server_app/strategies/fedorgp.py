"""FedORGP (Guo et al., 2025), server half: trained global prototypes, orthogonal to each other.

Other half: `client_app/algorithms/fedorgp.py`.
What is trained, and how: FedTGP's `server_app/strategies/fedtgp.py`.
Symbols: P_i^c the round's client prototypes; P̂^c = F(Ṕ^c) what goes down; γ = ``gamma``.

Loss                mean of (1 − cos(P_i^c, P̂^c)) + γ · mean over c' ≠ c of |cos(P_i^c, P̂^c')|

Deviations: the equations are those of the authors' code of November 2024 (aaaf664); here both terms
are averages. Its one epoch a round leaves P̂ near its random start for long. Classes that nobody has
take no part.
"""

from functools import partial

from protofl_common.algorithms.fedorgp import FedORGPHparams
from protofl_common.maths.losses import orthogonality
from server_app.strategies.base import Upload, all_vectors
from server_app.strategies.fedtgp import TrainedPrototypes


class FedORGP(TrainedPrototypes[FedORGPHparams]):
    """Trains the global prototypes by orthogonality."""

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        samples_PD, labels_P = all_vectors(uploads)
        loss = partial(orthogonality, gamma=self.hparams.gamma)
        return {"server-loss": self.train_on(samples_PD, labels_P, loss)}
