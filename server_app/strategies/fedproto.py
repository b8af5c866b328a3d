"""FedProto (Tan et al., AAAI 2022), server half: one global prototype per class, the clients' mean.

Other half: `client_app/algorithms/fedproto.py`.
Symbols: C_i^(j) client i's prototype of class j, made of |D_ij| samples; N_j = Σ_i |D_ij| over the
clients that hold j.

Aggregation (Eq. 4)     C̄^(j) = Σ_i (|D_ij| / N_j) · C_i^(j)    with ``weighting = "counts"``
                        C̄^(j) = mean_i C_i^(j)                  with ``weighting = "uniform"``
                                                                (the authors' code)
``merging`` may put a coordinate-wise median or trimmed mean over the clients in its place, without
weights. With ``late``, the weight |D_ij| or 1 of a client whose upload is ``a`` rounds old is
multiplied by (1 + a)^−``staleness``.

Deviations: Eq. 4 as printed has a further factor 1/|N_j|, with which prototypes would shrink as
clients join; it is left out. A class that nobody sent in a round retains its prototype.
"""

from protofl_common.algorithms.fedproto import FedProtoHparams
from server_app.strategies.base import ServerStrategy, Upload


class FedProto(ServerStrategy[FedProtoHparams]):
    """Keeps the global prototypes; in the first round there are none."""

    state: tuple[str, ...] = ("prototypes",)

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        self.prototypes = self.merged(uploads, self.hparams.weighting, self.prototypes)
        # Does nothing here; in `fedproto_avg`, where FedAvg is the next class, merges the weights
        return super().merge(uploads)
