"""The server's side of an algorithm: hooks, in the order in which `server_app/round.py` calls them.

payload_down, payload_for -> (clients) -> merge, and at the end prototypes and weights for the results

Every reply is checked against what the catalog declares before `merge` sees it. An algorithm's file has only its own
mathematics.
"""

from collections.abc import Mapping
from typing import Any, Generic, TypeVar, cast

from torch import Tensor

from protofl_common.basics.devices import seeded
from protofl_common.basics.files import digest
from protofl_common.basics.seeding import derive_seed
from protofl_common.basics.text import printable
from protofl_common.experiment.catalog import CATALOG, Algorithm, Hparams, half
from protofl_common.maths.aggregation import merge_prototypes
from protofl_common.maths.prototypes import Prototypes
from protofl_common.runs.attributes import restore_attributes, tensors_of
from protofl_common.wire.payloads import Payload, StateDict, template_of
from protofl_common.wire.schema import Template, weights_in
from server_app.network.membership import Federation, FederationError
from server_app.replies import Upload, together, vectors_of

__all__ = ["Federation", "FederationError", "Payload", "Prototypes", "ServerStrategy", "StateDict", "Template"]
__all__ += ["Upload", "template_of", "together", "vectors_of"]  # what an algorithm's file needs

H = TypeVar("H", bound=Hparams)


class ServerStrategy(Generic[H]):
    """Local: nothing goes down, nothing comes up. Algorithms override what differs."""

    state: tuple[str, ...] = ()  # What a round changes: in the checkpoint, searched for NaN, rolled back after an error
    prototypes: Prototypes | None = None  # The global ones, which go down and into the results, if there are any

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self.settings = federation.settings
        self.hparams = cast(H, federation.settings.hparams)
        self.row = federation.settings.row
        self.card = federation.reference  # For what all clients have alike; the majority's
        self.num_classes = len(self.card.classes)
        self.seed = derive_seed(self.settings.run.seed, self.settings.run.algo)  # Of the draws that this half makes
        self.reduced: set[str] = set()  # What `merge` reduces of a site's part in the aggregate: ``"site: how"``
        self.parts: dict[str, float] = {}  # Site -> the part of its change that `merge` used, where that is not all

    # -- hooks of an algorithm -----------------------------------------------------------------------------------
    def payload_down(self) -> Payload:
        """Return the payload for every client: by default, what `entry` gives of each entry that the row declares."""
        return Payload(**{name: self.entry(name) for name in self.settings.exchange.down})

    def entry(self, name: str) -> Any:
        """Return the attribute of that name, of weights `global_weights`; None where there is none."""
        return self.global_weights if name == "weights" else getattr(self, name, None)

    def payload_for(self, site: str, common: Payload) -> Payload:
        """Return the payload for ``site``, where it is not the ``common`` one."""
        return common

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        """The server's step on the round's valid uploads, in the order of the sites; metrics to report."""
        return {}

    @property
    def global_weights(self) -> StateDict | None:
        """The global model, where there is one."""
        return getattr(self, "weights", None)

    def templates(self) -> dict[str, Template]:
        """Declared entry -> the arrays that a client must send; the default: those of `entry`."""
        weights = {name: self.entry(name) for name in weights_in(self.settings.exchange.up)}
        if lacking := [name for name, entry in weights.items() if entry is None]:
            raise FederationError(f"{type(self).__name__} lacks {lacking[0]}: uploads must have its names and shapes")
        return {name: template_of(entry) for name, entry in weights.items()}

    # -- for algorithms to use -----------------------------------------------------------------------------------
    def merged(self, uploads: list[Upload], weighting: str, previous: Prototypes | None) -> Prototypes | None:
        """Average the uploads' prototypes by `Federation.bounds`; a class that nobody sent stays as in ``previous``."""
        sets = list(vectors_of(uploads).values())
        return merge_prototypes(sets, weighting, previous, *self.federation.bounds.prototypes) if sets else previous

    def present_state(self) -> dict[str, Tensor]:
        """The attributes in `state`, without copies: the next `merge` may change them."""
        return tensors_of(self, self.state)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint's tensors; from none, as before the first round."""
        if tensors:
            restore_attributes(self, self.state, tensors)


Strategy = ServerStrategy[Any]


def built(federation: Federation) -> Strategy:
    """The run's server half, on the majority's model; a site whose introduction does not give its model is left out.

    The weights of either direction are compared with those that clients count, where all are known here. Another
    package's half may keep its weights in an order of its own: their digest is not compared.
    """
    exchange, ours = federation.settings.exchange, federation.settings.run.algo in CATALOG
    while True:
        try:
            with seeded(federation.settings.run.seed):  # for a package's half
                strategy = server_half(federation.settings.row)(federation)
            templates = {"weights": template_of(strategy.global_weights or {}), **strategy.templates()}
            shared = weights_in({**exchange.down, **exchange.up})
            comparable = shared and ours and shared.keys() <= templates.keys()
            if not comparable or digest({name: templates[name] for name in shared}) == strategy.card.weights:
                return strategy
            raise ValueError(f"its arch and input_shape do not give the weights that it claims ({strategy.card.arch})")
        except FederationError:
            raise
        except (RuntimeError, ValueError) as error:
            if not federation.leave_out_reference(printable(str(error))):
                raise


def server_half(row: Algorithm) -> type[Strategy]:
    return half(row.server, ServerStrategy)
