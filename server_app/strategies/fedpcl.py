"""FedPCL (Tan et al., NeurIPS 2022), server half: mean prototypes, and every client's set.

Other half: `client_app/algorithms/fedpcl.py`.
Symbols: C_i^(j) client i's prototype of class j, made of |D_ij| samples; N_j = Σ_i |D_ij| over the
clients that hold j.

Global (Eq. 6)      C̄^(j) = Σ_i (|D_ij| / N_j) · C_i^(j)
The clients' sets go down as they came; each client pads them itself (Eq. 7), since it has C̄.
``merging`` may put a median or trimmed mean in the place of Eq. 6.

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

    state = ("prototypes", "sets")

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation)
        self.sets: dict[str, Prototypes] = {}

    def payload_down(self) -> Payload:
        """Return the global prototypes, and the set that each client sent last."""
        if self.prototypes is None:
            return Payload()
        local_sets = tuple(self.sets[site] for site in in_order(self.sets))
        return Payload(prototypes=self.prototypes, local_sets=local_sets or None)

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        self.prototypes = self.merged(uploads, "counts", self.prototypes)  # Eq. 6
        if "local_sets" in self.settings.exchange.down:  # Unless settings leave out the local loss
            sent = vectors_of(uploads)
            self.sets |= {site: prototypes.without_counts() for site, prototypes in sent.items()}
        return {}
