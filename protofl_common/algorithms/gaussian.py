"""Gaussian head: its hyper-parameters, and what it exchanges."""

from protofl_common.algorithms.base import Algorithm, OwnHparams
from protofl_common.config.options import Needed, option
from protofl_common.wire.schema import Counts, Exchange, Moments


class GaussianHparams(OwnHparams):
    shrinkage: float = option(
        default=-1.0,
        minimum=-1,
        maximum=1,
        help=(
            "ρ: the part of a covariance that is replaced by its mean variance; -1: chosen by the"
            " oracle approximating shrinkage (OAS)"
        ),
    )
    priors: str = option(
        default="global",
        choices=("global", "personal"),
        with_dp=Needed(
            "global", "the client's own class shares, without noise, would shape its predictions"
        ),
        help="π_c of the head: of all clients' samples, or personal (the client's own)",
    )
    revocable: bool = option(
        default=False,
        with_secagg=Needed(
            False, "hides what single sites send; to take one out, make the run again without it"
        ),
        help="the server stores what each site sent, so that `protofl forget` can take a site out",
    )
    start_from: str = option(
        default="",
        with_secagg=Needed(
            "", "hides what single sites send; to add one, make the run again with it"
        ),
        help=(
            "the folder, at the server, of a run with revocable = true: its sites count in the new"
            " run, and need not take part again"
        ),
    )


ALGORITHM = Algorithm(
    title="Gaussian head",
    paper="FedCGS, Guan et al., AAAI 2025",
    client="client_app.algorithms.gaussian",
    server="server_app.strategies.gaussian",
    hparams=GaussianHparams,
    exchange=Exchange(down={"moments": Moments(), "counts": Counts()}, up={"moments": Moments()}),
    losses=(),
    one_shot=True,
    frozen_backbones=True,
    supports=("secagg",),
    private=("moments",),
    tasks=("single-label", "multi-label"),
)
