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
from protofl_common.models.build import initial_model
from protofl_common.models.devices import seeded
from protofl_common.models.split import SplitModel
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
    """The server half of local training, where nothing is exchanged; algorithms override hooks."""

    state: tuple[str, ...] = ()
    """Names of the attributes that a round changes.

    They are in the checkpoint, are searched for NaN, and are rolled back after an error.
    """
    prototypes: Prototypes | None = None
    """The global prototypes, which are sent and written to the results; None without any."""

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self.settings = federation.settings
        self.hparams = cast(H, federation.settings.hparams)
        self.row = federation.settings.row
        self.card = federation.reference  # An introduction with what all clients have in common
        self.task = task_of(self.card.classes, self.settings.data.task)
        self.num_classes = self.task.num_classes
        # of all draws of this half
        self.seed = derive_seed(self.settings.run.seed, self.settings.run.algo)

    # -- hooks of an algorithm ---------------------------------------------------------------------
    def payload_down(self) -> Payload:
        """Return the payload for all clients: by default `value_of` for each declared entry."""
        return Payload(**{name: self.value_of(name) for name in self.settings.exchange.down})

    def value_of(self, name: str) -> Any:
        """Return what is sent to clients as the entry ``name``; None for nothing.

        By default it is the attribute of that name, and for "weights" the global model.
        """
        if name == "weights":
            return self.global_weights
        return getattr(self, name, None)

    def payload_for(self, site: str, common: Payload) -> Payload:
        """Return the payload for ``site``: by default ``common``, that for all clients.

        An algorithm that sends sites different payloads returns another one.
        """
        return common

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        """Do the server's step on the valid uploads of a round, which are in the order of sites.

        Returns figures for the round's report, by name.
        """
        return {}

    def used_fraction(self, upload: Upload) -> float:
        """Return the fraction of a client's change that `merge` uses.

        The client's next message tells it.
        """
        return 1.0

    @property
    def global_weights(self) -> StateDict | None:
        """The global model, where there is one."""
        return getattr(self, "weights", None)

    def templates(self) -> dict[str, Template]:
        """Return the names and shapes of weights that clients must send, for each declared entry.

        By default they are those of the server's own value of the entry (`value_of`).
        Raises FederationError where it has nothing.
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
        """Return what each of the sites would have sent as the entry ``name`` without training.

        The length of a site's change is measured from there (``max-update-ratio``). None where
        changes are not to be cut.
        """
        return None

    def most_vectors(self, upload: Upload) -> float | None:
        """Return the most vectors that an honest client with this upload's samples sends.

        None if the algorithm sets no limit.
        """
        return None

    # -- for algorithms to use ---------------------------------------------------------------------
    def merged(
        self, uploads: list[Upload], weighting: str, previous: Prototypes | None
    ) -> Prototypes | None:
        """Return one prototype for each class, merged from those of the uploads.

        It is their mean, by "counts" of samples or "uniform" (``weighting``), or what ``merging``
        puts in its place. A class that nobody sent stays as in ``previous``.
        """
        sent = vectors_of(uploads)
        if not sent:
            return previous
        # below 1 for late uploads, which weigh less
        factors = [upload.age_factor for upload in uploads if upload.site in sent]
        aggregator = self.federation.bounds.prototype_aggregator
        return aggregator.merge_prototypes([*sent.values()], weighting, previous, factors)

    def drawn_model(self, arch: str, input_shape: tuple[int, ...]) -> SplitModel:
        """Return a model with the first weights that the server draws; () leaves out its body."""
        settings = self.settings
        return initial_model(
            arch, input_shape, self.task.num_outputs, settings.model, settings.run.seed, "global"
        )

    def present_state(self) -> dict[str, Tensor]:
        """Return the tensors of the attributes in `state`, for a checkpoint.

        They are no copies: the next `merge` may change them.
        """
        return tensors_of(self, self.state)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the attributes in `state` from a checkpoint's tensors, if it has any."""
        if tensors:
            restore_attributes(self, self.state, tensors)


Strategy = ServerStrategy[Any]


def build_strategy(federation: Federation) -> Strategy:
    """Build the server half of the run's algorithm, on the network of the reference site.

    If that site's introduction does not give the weights that it claims, all sites of its network
    are left out, and another site is the reference, as long as enough sites are left.
    """
    while True:
        try:
            # half of an algorithm from another package may draw from PyTorch's own generator
            with seeded(federation.settings.run.seed):
                strategy = server_half(federation.settings.row)(federation)
            _check_weights(strategy)
            return strategy
        except FederationError:
            raise
        except (RuntimeError, ValueError) as error:
            if not federation.leave_out_reference(printable(str(error))):
                raise


def _check_weights(strategy: Strategy) -> None:
    """Raise ValueError if the server's weights are not those that the reference site claims.

    Names, types and shapes of both directions are compared, by a digest. It is not done where the
    server does not have all of them, nor for algorithms of other packages, which may order their
    weights differently.
    """
    exchange = strategy.settings.exchange
    templates = {
        "weights": template_of(strategy.global_weights or {}),
        **strategy.templates(),
    }
    shared = weights_in({**exchange.down, **exchange.up})
    is_ours = strategy.settings.run.algo in CATALOG
    has_all = shared.keys() <= templates.keys()
    if not shared or not is_ours or not has_all:
        return
    if digest({name: templates[name] for name in shared}) != strategy.card.weights:
        arch = strategy.card.arch
        raise ValueError(
            f"its arch and input_shape do not give the weights that it claims ({arch})"
        )


def server_half(row: Algorithm) -> type[Strategy]:
    return half(row.server, ServerStrategy)
