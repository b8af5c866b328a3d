"""FedKD: its hyper-parameters, and what it exchanges."""

from protofl_common.algorithms.base import Algorithm, OwnHparams
from protofl_common.config.architectures import architecture_option
from protofl_common.config.options import option
from protofl_common.wire.schema import Exchange, Update, Weights


class FedKDHparams(OwnHparams):
    student: str = architecture_option(
        help='architecture of the student; "": the first of `models`',
    )
    energy_start: float = option(
        default=0.95,
        above=0,
        maximum=1,
        help=(
            "T_start: which part of a matrix's squared singular values its factors keep in the"
            " first round"
        ),
    )
    energy_end: float = option(
        default=0.98,
        above=0,
        maximum=1,
        help="T_end: the same in the last round",
    )

    def energy(self, server_round: int, rounds: int) -> float:
        """Return T: the part of a matrix's squared singular values that its factors keep.

        It changes by the same amount in each round, up to ``energy-end`` in the last. Client and
        server both compress by it.
        """
        growth = self.energy_end - self.energy_start
        return self.energy_start + growth * server_round / rounds


ALGORITHM = Algorithm(
    title="FedKD",
    paper="Wu et al., Nature Communications 2022",
    client="client_app.algorithms.fedkd",
    server="server_app.strategies.fedkd",
    hparams=FedKDHparams,
    exchange=Exchange(
        down={"weights": Weights(of="student"), "update": Update(of="student")},
        up={"weights": Update(of="student")},
    ),
    losses=(
        "cross-entropy",
        "mutual",
        "hidden",
        "student-cross-entropy",
        "student-mutual",
        "student-hidden",
    ),
    supports=("merging",),
    private=("weights",),
    single_uploads="its updates travel as factors, which cannot be added",
)
