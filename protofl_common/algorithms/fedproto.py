"""FedProto: its hyper-parameters, and what it exchanges."""

from protofl_common.algorithms.base import Algorithm, AlignmentHparams
from protofl_common.config.options import option
from protofl_common.wire.schema import Exchange, Vectors


class FedProtoHparams(AlignmentHparams):
    weighting: str = option(
        default="counts",
        choices=("counts", "uniform"),
        help="a client's weight in the mean of a class: counts (Eq. 4), uniform (authors' code)",
    )

    def exchange(self, declared: Exchange) -> Exchange:
        """Return the exchange; numbers of samples travel only if the server weights by them."""
        prototypes = Vectors(counts=self.weighting == "counts")
        return Exchange(down=declared.down, up={**declared.up, "prototypes": prototypes})


ALGORITHM = Algorithm(
    title="FedProto",
    paper="Tan et al., AAAI 2022",
    client="client_app.algorithms.fedproto",
    server="server_app.strategies.fedproto",
    hparams=FedProtoHparams,
    exchange=Exchange(down={"prototypes": Vectors()}, up={"prototypes": Vectors(counts=True)}),
    losses=("cross-entropy", "prototype"),
    averages_prototypes=True,
    supports=("merging", "secagg", "late"),
    private=("prototypes",),
    tasks=("single-label", "multi-label"),
)
