"""FedPCL (Tan et al., NeurIPS 2022), server half: mean prototypes, and every client's padded set.

Other half: `client_app/algorithms/fedpcl.py`.
Symbols: C_i^(j) client i's prototype of class j, made of |D_ij| samples; N_j = Σ_i |D_ij| over the
clients that hold j.

Global (Eq. 6)      C̄^(j) = Σ_i (|D_ij| / N_j) · C_i^(j)
Padding (Eq. 7)     C_i^(j) ← C̄^(j) for the classes j that client i does not hold
``merging`` may put a median or trimmed mean in the place of Eq. 6; the clients' own sets go down as
they came.

Deviations: Eq. 6 as printed has a further factor 1/|N_j|, which is left out, as in FedProto. A
client that is not asked in a round is represented by the set it sent last; a class that nobody sent
retains its prototype.
"""

from protofl_common.algorithms.fedpcl import FedPCLHparams
from protofl_common.basics.text import in_order
from server_app.strategies.base import (
    Federation,
    Payload,
    Prototypes,
    ServerStrategy,
    Upload,
    vectors_of,
)


class FedPCL(ServerStrategy[FedPCLHparams]):
    """Keeps the global prototypes and the last set of every client; at first there are none."""

    state: tuple[str, ...] = ("prototypes", "sets")

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation)
        self.sets: dict[str, Prototypes] = {}

    def payload_down(self) -> Payload:
        """Return the global prototypes, and each client's last set, padded by them (Eq. 7)."""
        if self.prototypes is None:
            return Payload()
        local_sets = []
        for site in in_order(self.sets):
            padded = self.sets[site].completed_by(self.prototypes)
            local_sets.append(padded.only(padded.labels.argsort()))
        return Payload(prototypes=self.prototypes, local_sets=tuple(local_sets) or None)

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        self.prototypes = self.merged(uploads, "counts", self.prototypes)  # Eq. 6
        if "local_sets" in self.settings.exchange.down:
            sent = vectors_of(uploads)
            self.sets |= {site: prototypes.without_counts() for site, prototypes in sent.items()}
        return {}
