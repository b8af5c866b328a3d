"""The server's side of an algorithm: hooks, in the order in which `server_app/round.py` calls them.

payload_down, payload_for -> (clients) -> merge; at the end, prototypes and weights for the results

Every reply is checked against what the catalog declares before `merge` sees it. An algorithm's file
has only its own mathematics.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

from torch import Tensor

from protofl_common.algorithms.base import Algorithm, Hparams
from protofl_common.basics.files import digest
from protofl_common.basics.seeding import derive_seed
from protofl_common.basics.text import printable
from protofl_common.experiment.catalog import CATALOG, half
from protofl_common.maths.prototypes import Prototypes
from protofl_common.models.devices import seeded
from protofl_common.runs.attributes import restore_attributes, tensors_of
from protofl_common.tasks import task_of
from protofl_common.wire.payloads import Payload, StateDict, template_of
from protofl_common.wire.schema import Template, weights_in
from server_app.network.membership import Federation, FederationError
from server_app.run.replies import Upload, all_vectors, vectors_of

__all__ = [  # What an algorithm's file needs
    "Federation",
    "FederationError",
    "H",
    "Payload",
    "Prototypes",
    "ServerStrategy",
    "StateDict",
    "Template",
    "Upload",
    "all_vectors",
    "template_of",
    "vectors_of",
]

H = TypeVar("H", bound=Hparams)


class ServerStrategy(Generic[H]):
    """Local: nothing goes down, nothing comes up. Algorithms override what differs."""

    state: tuple[str, ...] = ()
    """Names of the attributes that a round changes.

    They are in the checkpoint, are searched for NaN, and are rolled back after an error.
    """
    prototypes: Prototypes | None = None
    """The global ones, which go down and into the results, if there are any."""

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self.settings = federation.settings
        self.hparams = cast(H, federation.settings.hparams)
        self.row = federation.settings.row
        self.card = federation.reference  # For what all clients have alike; the majority's
        self.task = task_of(self.card.classes, self.settings.data.task)
        self.num_classes = self.task.num_classes
        # Of the draws that this half makes
        self.seed = derive_seed(self.settings.run.seed, self.settings.run.algo)

    # -- hooks of an algorithm ---------------------------------------------------------------------
    def payload_down(self) -> Payload:
        """Return the payload for every client: by default, the `value_of` each declared entry."""
        return Payload(**{name: self.value_of(name) for name in self.settings.exchange.down})

    def value_of(self, name: str) -> Any:
        """Return what goes down as the entry ``name``: the attribute of that name, if there is one.

        For ``weights`` it is the global model.
        """
        if name == "weights":
            return self.global_weights
        return getattr(self, name, None)

    def payload_for(self, site: str, common: Payload) -> Payload:
        """Return the payload for ``site``, where it is not the ``common`` one."""
        return common

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        """Do the server's step on the round's valid uploads, in the order of the sites.

        Returns figures to report.
        """
        return {}

    def used_fraction(self, upload: Upload) -> float:
        """Return the fraction of a client's change that `merge` uses; its next message says it."""
        return 1.0

    @property
    def global_weights(self) -> StateDict | None:
        """The global model, where there is one."""
        return getattr(self, "weights", None)

    def templates(self) -> dict[str, Template]:
        """Return, of each declared entry of weights, the names and shapes that a client must send.

        By default, they are those of the server's own `value_of` it.
        """
        templates = {}
        for name in weights_in(self.settings.exchange.up):
            weights = self.value_of(name)
            if weights is None:
                lacking = f"{type(self).__name__} lacks {name}"
                raise FederationError(f"{lacking}: uploads must have its names and shapes")
            templates[name] = template_of(weights)
        return templates

    # -- what the protections ask (`server_app/protections`) ---------------------------------------
    def starting_points(self, name: str, sites: Sequence[str]) -> list[StateDict] | None:
        """Return what each site would have sent as the entry ``name`` without training.

        Changes are cut to a length that is counted from there; None where none is cut.
        """
        return None

    def most_vectors(self, upload: Upload) -> float | None:
        """Return how many vectors a client with so many samples sends; None leaves it open."""
        return None

    # -- for algorithms to use ---------------------------------------------------------------------
    def merged(
        self, uploads: list[Upload], weighting: str, previous: Prototypes | None
    ) -> Prototypes | None:
        """Merge the uploads' prototypes, as `Federation.bounds` says, to one for each class.

        A class that nobody sent stays as in ``previous``.
        """
        sent = vectors_of(uploads)
        if not sent:
            return previous
        factors = [upload.age_factor for upload in uploads if upload.site in sent]
        aggregator = self.federation.bounds.prototype_aggregator
        return aggregator.merge_prototypes([*sent.values()], weighting, previous, factors)

    def present_state(self) -> dict[str, Tensor]:
        """The attributes in `state`, without copies: the next `merge` may change them."""
        return tensors_of(self, self.state)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint's tensors; from none, as before the first round."""
        if tensors:
            restore_attributes(self, self.state, tensors)


Strategy = ServerStrategy[Any]


def build_strategy(federation: Federation) -> Strategy:
    """Build the run's server half, on the majority's model.

    A site whose introduction does not give its model is left out, and the next one is the model.
    """
    while True:
        try:
            with seeded(federation.settings.run.seed):  # For a package's half
                strategy = server_half(federation.settings.row)(federation)
            _check_weights(strategy)
            return strategy
        except FederationError:
            raise
        except (RuntimeError, ValueError) as error:
            if not federation.leave_out_reference(printable(str(error))):
                raise


def _check_weights(strategy: Strategy) -> None:
    """Raise ValueError if the weights of either direction are not those that the client claims.

    They are compared where all are known here. Another package's half may keep its weights in an
    order of its own, so their digest is not compared.
    """
    exchange = strategy.settings.exchange
    templates = {
        "weights": template_of(strategy.global_weights or {}),
        **strategy.templates(),
    }
    shared = weights_in({**exchange.down, **exchange.up})
    is_ours = strategy.settings.run.algo in CATALOG
    if not shared or not is_ours or not shared.keys() <= templates.keys():
        return
    if digest({name: templates[name] for name in shared}) != strategy.card.weights:
        arch = strategy.card.arch
        raise ValueError(
            f"its arch and input_shape do not give the weights that it claims ({arch})"
        )


def server_half(row: Algorithm) -> type[Strategy]:
    return half(row.server, ServerStrategy)
