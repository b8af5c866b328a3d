"""FedAvg (McMahan et al., AISTATS 2017), server half: the mean of the weights by training samples.

Other half: `client_app/algorithms/fedavg.py`.
w ← Σ_i (n_i / Σ n) · w_i over the round's clients, n_i their training samples, bounded by
``max-samples-ratio`` and ``max-samples-lead``. Integer buffers (batch-normalisation counters) are
averaged and rounded. ``merging`` may put a coordinate-wise median or trimmed mean in its place, and
``max-update-ratio`` bound each w_i − w before (`server_app/protections/changes.py`). With ``late``,
n_i of an upload that is a rounds old is multiplied by (1 + a)^−``staleness``.
"""

from collections.abc import Sequence

from protofl_common.models.split import SplitModel
from protofl_common.runs.events import Warned
from protofl_common.wire.payloads import StateDict, declared_part
from protofl_common.wire.schema import Weights, weights_in
from server_app.run.log import emit
from server_app.strategies.base import Federation, FederationError, H, ServerStrategy, Upload


class FedAvg(ServerStrategy[H]):
    """Keeps the weights that clients share: of a whole model, or of the part that the row declares.

    The server draws the first ones.
    """

    state: tuple[str, ...] = ("weights",)

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation)
        self.shared_part: Weights = weights_in(self.settings.exchange.up)["weights"]
        # `of` is the client's attribute that is shared, such as the meme of FML; a hyper-parameter
        # of that name may say its architecture
        named_arch = getattr(self.hparams, self.shared_part.of, None)
        if named_arch is None:
            self.arch = self.card.arch
        else:
            self.arch = self.settings.architecture(0, named_arch)
        model = self.first_model()
        self.parameters = [name for name, _ in model.named_parameters()]  # The others are buffers
        self.weights: StateDict = declared_part(model, self.shared_part)
        if not self.weights:
            shared = f"shares all but the last {self.shared_part.without_last} layers of a model"
            raise FederationError(f"{self.settings.run.algo} {shared}, and {self.arch} has no more")
        shares_everything = len(self.weights) == len(model.state_dict())
        # a row that leaves out normalisation layers, as FedBN's, differs from FedAvg in these alone
        if shares_everything and not self.shared_part.normalisation:
            algo = self.settings.run.algo
            emit(Warned(f"{self.arch} has no normalisation layers, so {algo} is fedavg"))

    def first_model(self) -> SplitModel:
        """Build the model, with its first weights, of which all or a part is shared.

        Where only heads are shared, the input shape () leaves out the body, whose code the server
        need not have.
        """
        heads_alone = self.shared_part.parts == ("head.",)
        shape = () if heads_alone else self.card.input_shape
        return self.drawn_model(self.arch, shape)

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        self.weights = self.averaged(uploads)
        return {}

    def averaged(self, uploads: list[Upload], name: str = "weights") -> StateDict:
        """Return the mean of what clients sent as the entry ``name``, weighted by their samples.

        ``merging`` may put a median or trimmed mean in its place.
        """
        total = sum(upload.weight for upload in uploads)
        sent = [upload.weights(name) for upload in uploads]
        shares = [upload.weight / total for upload in uploads]
        return self.federation.bounds.weight_aggregator.merge_weights(sent, shares)

    def starting_points(self, name: str, sites: Sequence[str]) -> list[StateDict] | None:
        """Return the weights that each site receives, from which its change is measured."""
        if name != "weights":
            return None
        common = self.payload_down()
        return [self.payload_for(site, common).weights() or {} for site in sites]
