"""FedPCL: its hyper-parameters, and what it exchanges."""

from protofl_common.algorithms.base import Algorithm, OwnHparams
from protofl_common.config.options import option
from protofl_common.wire.schema import Exchange, Vectors, VectorSets


class FedPCLHparams(OwnHparams):
    temperature: float = option(default=0.07, above=0, help="τ (Eq. 8)")
    prototypes: str = option(
        default="both",
        choices=("both", "global", "local"),
        help=(
            "which prototypes a sample is contrasted with: global ones (L_g), local ones (L_p), or"
            " both; Table 6"
        ),
    )
    loss: str = option(
        default="contrast",
        choices=("contrast", "supcon", "ce-protodist", "ce"),
        help="contrast (Eq. 10); supcon, ce-protodist, ce: Table 5",
    )
    denominator: str = option(
        default="others",
        choices=("others", "all"),
        help="the labels A(y) in the denominator of Eq. 8: others (all labels but y), or all",
    )

    @property
    def uncovered_by_dp(self) -> str:
        if self.loss != "supcon":
            return ""
        return "fedpcl.loss = 'supcon' compares samples, whose gradients are then no sample's own"

    def exchange(self, declared: Exchange) -> Exchange:
        """Return the exchange, without the sets of single clients if no loss term uses them."""
        if self.loss == "contrast" and self.prototypes != "global":
            return declared
        return Exchange(down={"prototypes": declared.down["prototypes"]}, up=declared.up)


ALGORITHM = Algorithm(
    title="FedPCL",
    paper="Tan et al., NeurIPS 2022",
    client="client_app.algorithms.fedpcl",
    server="server_app.strategies.fedpcl",
    hparams=FedPCLHparams,
    exchange=Exchange(
        down={"prototypes": Vectors(), "local_sets": VectorSets()},
        up={"prototypes": Vectors(counts=True)},
    ),
    losses=("contrast", "global", "local", "cross-entropy", "prototype"),
    averages_prototypes=True,
    frozen_backbones=True,
    supports=("merging", "secagg"),
    private=("prototypes",),
)
