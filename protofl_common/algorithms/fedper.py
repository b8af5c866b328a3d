"""FedPer: its hyper-parameters, and what it exchanges."""

from protofl_common.algorithms.base import Algorithm, OwnHparams, both_ways
from protofl_common.config.options import option
from protofl_common.wire.schema import Exchange, Weights


class FedPerHparams(OwnHparams):
    personal_layers: int = option(
        default=1,
        minimum=0,
        help="K_P: this many of the last layers with weights stay at the client; 0: FedAvg",
    )

    def exchange(self, declared: Exchange) -> Exchange:
        """Return the exchange of all weights but the personal layers, which are the last ones."""
        shared = {"weights": Weights(without_last=self.personal_layers)}
        return Exchange(down=shared, up=shared)


ALGORITHM = Algorithm(
    title="FedPer",
    paper="Arivazhagan et al., 2019",
    client="client_app.algorithms.base",
    server="server_app.strategies.fedavg",
    hparams=FedPerHparams,
    exchange=both_ways(weights=Weights(without_last=1)),
    supports=("merging", "secagg", "late"),
    private=("weights",),
    tasks=("single-label", "multi-label"),
)
