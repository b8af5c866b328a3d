"""FedDistill, server half: the teachers, which are means of the other clients' outputs.

FD: Jeong et al., "Communication-Efficient On-Device Machine Learning", 2018.
Other half: `client_app/algorithms/feddistill.py`.
Symbols: F̄_ℓ^(j) client j's mean output over its samples of class ℓ; F̂_ℓ^(i) what teaches client i
this class.

Teacher (Alg. 1)    F̂_ℓ^(i) = mean of F̄_ℓ^(j) over the clients j ≠ i that hold the class
``outputs = "logits"`` (HtFLlib) takes the mean over all of them, client i too. ``merging`` may put
a median or trimmed mean in its place.

Deviations: in the paper every device has every class and takes part in every round. Here a client
that is not asked in a round is represented by what it sent last; one that has never been asked has
the teacher of all.
"""

from protofl_common.algorithms.feddistill import FedDistillHparams
from protofl_common.basics.text import in_order
from server_app.strategies.base import (
    Federation,
    Payload,
    Prototypes,
    ServerStrategy,
    Upload,
    vectors_of,
)


class FedDistill(ServerStrategy[FedDistillHparams]):
    """Keeps what every client sent last; in the first round there is nothing."""

    state = ("outputs",)

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation)
        self.outputs: dict[str, Prototypes] = {}

    def payload_down(self) -> Payload:
        return self._mean_of(in_order(self.outputs))

    def payload_for(self, site: str, common: Payload) -> Payload:
        """Return F̂^(i), the mean of the other clients' outputs.

        Return the mean of all with ``outputs = "logits"``, or for a client that has sent nothing.
        """
        if self.hparams.outputs == "logits" or site not in self.outputs:
            return common
        others = [other for other in in_order(self.outputs) if other != site]
        return self._mean_of(others)

    def _mean_of(self, sites: list[str]) -> Payload:
        """Return a payload with the mean of what these sites sent last, empty without sites."""
        if not sites:
            return Payload()
        sets = [self.outputs[site] for site in sites]
        aggregator = self.federation.bounds.prototype_aggregator
        return Payload(outputs=aggregator.merge_prototypes(sets, "uniform", None))

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        self.outputs |= vectors_of(uploads, "outputs")
        return {}
