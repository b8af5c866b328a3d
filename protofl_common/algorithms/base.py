"""What an algorithm's row says; beside this file stands one for each algorithm.

A row says what the halves of an algorithm exchange, and the wire code (`wire`) enforces it in both
directions: nothing that a row does not declare can be packed or is accepted.
"""

from dataclasses import dataclass, field
from typing import Literal

from protofl_common.config.options import Table, option
from protofl_common.wire import schema
from protofl_common.wire.schema import Entry, Exchange

CLUSTERINGS = ("finch", "kmeans", "average")  # of `prototypes.cluster`


@dataclass(frozen=True)
class Hparams:
    """The hyper-parameters of an algorithm; this base has none."""

    def exchange(self, declared: Exchange) -> Exchange:
        """Return what is exchanged under these hyper-parameters: by default all that is declared.

        ``declared`` is the exchange of the algorithm's row; an override may narrow it.
        """
        return declared

    def due(self, server_round: int, rounds: int) -> bool:
        """Return whether clients send prototypes in this round of ``rounds``."""
        return True

    @property
    def needs_last_round(self) -> str:
        """Return "" if a run may stop early; else the setting that would let it, with its value.

        A run may not stop early if the algorithm does a part of its work in the last round only:
        ProtoFed returns ``protofed.prototypes = 'every-round'``.
        """
        return ""

    def problem_with_task(self, task: str) -> str:
        """Say which value has no meaning for a ``task``, and what to set; "" for none."""
        return ""

    @property
    def uncovered_by_dp(self) -> str:
        """Name the value here that differential privacy does not cover, and say why; or ""."""
        return ""


class OwnHparams(Hparams, Table):
    """A base for algorithms here.

    Another package writes ``@dataclass(frozen=True)`` above a class of `Hparams`.
    """


class AlignmentHparams(OwnHparams):
    """Hyper-parameters of `losses.prototype_alignment`."""

    lambda_: float = option(
        default=1.0,
        minimum=0,
        help=(
            "weight of the prototype term (Eq. 5). The report from which we reproduced the paper"
            " names no value; 1 is our default and HtFLlib's, and FedTGP's paper takes 0.1"
        ),
    )
    distance: str = option(
        default="mse",
        choices=("l2", "squared-l2", "l1", "mse"),
        help=(
            "the distance d of Eq. 6: mse (the authors' code), l2, squared-l2, l1;"
            " docs/algorithms/fedproto.md compares them"
        ),
    )
    granularity: str = option(
        default="sample",
        choices=("class", "class-mean", "sample"),
        help=(
            "what the distance is taken of. sample: each sample's features, averaged over samples"
            " (the authors' code); class: the batch's class means, summed over classes (Eq. 6);"
            " class-mean: the same, averaged over classes"
        ),
    )


class ServerTrainingHparams(OwnHparams):
    """Hyper-parameters of a server that trains on the clients' vectors."""

    server_epochs: int = option(
        default=100,
        minimum=1,
        help="how often the server goes over the clients' vectors of a round",
    )
    server_lr: float = option(default=0.01, above=0, help="learning rate of the server's SGD")
    server_batch_size: int = option(
        default=10,
        minimum=0,
        help="the clients' vectors in one step of the server; 0: all at once",
    )


def both_ways(**entries: Entry) -> Exchange:
    """Return the exchange in which these entries, by name, go down and come up."""
    return Exchange(down=entries, up=entries)


@dataclass(frozen=True)
class Algorithm:
    """A row: an algorithm's two halves, and what a run with it may do."""

    title: str
    paper: str
    client: str
    """Its client half: a module, or ``module:Class``; where it adds nothing, another's."""
    server: str
    """Its server half, likewise."""
    hparams: type[Hparams] = Hparams
    exchange: Exchange = field(default_factory=Exchange)
    losses: tuple[str, ...] = ("cross-entropy",)
    """Names of the loss terms that its clients report."""
    averages_prototypes: bool = False
    """The server takes a mean over the clients' prototypes of a class, which ``merging`` replaces;
    where it trains on prototypes or clusters them, ``merging`` leaves out those far from the other
    clients' (`aggregation.py`)."""
    supports: tuple[Literal["merging", "secagg", "late"], ...] = ()
    """Settings that the server half was written for: ``merging`` acts in its `merge`; with
    ``secagg`` that takes one upload, the mean of all; with ``late`` some uploads are of earlier
    rounds, and weigh less in all that it does. Any other value of these is refused."""
    single_uploads: str = ""
    """What the server needs single uploads for, beside what `exchange` shows; "": nothing."""
    private: tuple[str, ...] = ()
    """Entries of the upload that differential privacy covers: weights that `PrivateStep` alone has
    trained, and tables of classes with noise. An algorithm that sends any other is refused under
    ``dp``."""
    tasks: tuple[str, ...] = ("single-label",)
    """Values of the setting ``task`` for which its equations have a meaning."""
    one_shot: bool = False
    """A client trains nothing, so its upload is the same in every round."""
    frozen_backbones: bool = False
    """Frozen backbones are used unless the settings say otherwise."""

    def needs_single_uploads(self, exchange: Exchange) -> str:
        """Say why the server needs each client's upload by itself; "" if their sum is enough.

        ``exchange`` is what the algorithm exchanges with the run's hyper-parameters.
        """
        if any(entry.shows_single_clients for entry in exchange.down.values()):
            return "its clients receive one another's prototypes"
        vectors_up = schema.vectors_in(exchange.up)
        if vectors_up and not self.averages_prototypes:
            return "its server does more with the clients' prototypes than average them"
        if any(entry.several for entry in vectors_up.values()):
            return "a sum has one vector of each class, where its clients send several"
        if self.single_uploads:
            return self.single_uploads
        if exchange.up and "secagg" not in self.supports:
            return "its row does not declare support for secagg"
        return ""

    @property
    def reported_losses(self) -> tuple[str, ...]:
        return ("total", "unlabelled", *self.losses)  # FedPU's term, of any algorithm

    @property
    def tells_classes(self) -> bool:
        """True if uploads tell which classes a client has.

        A client then has to name its classes when it introduces itself, and the server compares
        its uploads with them.
        """
        return any(entry.shows_classes for entry in self.exchange.up.values())
