"""FedGH (Yi et al., ACM Multimedia 2023), server half: the global header, which the server trains.

Other half: `client_app/algorithms/base.py`; a client takes in θ and trains it with its extractor by
cross-entropy.
Symbols: φ_k the extractor (body) of client k, of any architecture; θ the header (head), one for
all; R̄_k^s client k's mean representation of class s (`samples_PD`, `labels_P`); η = `server-lr`.

Upload              R̄_k^s = mean of φ_k(x) over client k's training samples of class s,
                    after training
Inference           θ(φ_k(x)), with the header just received
Training            θ ← θ − η ∇ mean of CE(θ(R̄_k^s), s), in shuffled batches of
                    ``server-batch-size``, ``server-epochs`` times over the representations of the
                    round

Down: θ. Up: R̄_k^s without counts. Stays: φ_k.

Deviations: a representation is one mean over all samples of the class, in the authors' code a mean
of batches' means; that code evaluates after local training, and clips gradients. The abstract has
one step for each R̄_k^s, 1 of both settings; their defaults are HtFLlib's. In the authors' code the
optimizer of these steps has a client's network, not θ, whose first weights so stay.
"""

import torch

from protofl_common.algorithms.base import ServerTrainingHparams
from server_app.learning.training import loss_of, server_device, train
from server_app.strategies.base import Federation, ServerStrategy, StateDict, Upload, all_vectors


class FedGH(ServerStrategy[ServerTrainingHparams]):
    """Keeps θ, which is not trained where the setting ``head`` freezes it."""

    state = ("head", "generator")

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation)
        # without a body: its head takes the clients' vectors
        model = self.drawn_model(self.card.arch, ())
        self.head = model.head.eval().to(server_device(self.settings.machine))
        self.generator = torch.Generator().manual_seed(self.seed)

    @property
    def global_weights(self) -> StateDict:
        """θ, under the names that it has in a client's model."""
        return {f"head.{name}": value.cpu() for name, value in self.head.state_dict().items()}

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        """Train θ on the clients' representations, unless all of it is frozen (``head``)."""
        parameters = [parameter for parameter in self.head.parameters() if parameter.requires_grad]
        if not parameters:
            return {}
        optimizer = torch.optim.SGD(parameters, lr=self.hparams.server_lr)
        mean_loss = train(
            loss_of(self.task, self.head),
            all_vectors(uploads),
            optimizer,
            self.hparams,
            self.generator,
        )
        return {"server-loss": mean_loss}
