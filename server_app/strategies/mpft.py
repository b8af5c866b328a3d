"""MPFT (Zhang et al., ICLR 2025), server half: a model, trained on the clients' centres.

Other half: `client_app/algorithms/mpft.py`.
Symbols: r_p a centre with its class y_p; g∘h classifier and adapter; ρ = ``sample-ratio``.

Training            min Σ_p CE(g(h(r_p)), y_p) by AdamW, S = ``server-epochs`` epochs in shuffled
                    minibatches

A client's centres count until it sends others, so one round is enough, and who joins later adds to
it. Of n samples, as far as these are let count, ρ · n and one more for each class are taken: the
number of centres weighs a client.
"""

import torch

from protofl_common.algorithms.mpft import MPFTHparams
from server_app.learning.training import loss_of, server_device, train
from server_app.strategies.base import (
    Federation,
    Payload,
    Prototypes,
    ServerStrategy,
    StateDict,
    Upload,
    vectors_of,
)


class MPFT(ServerStrategy[MPFTHparams]):
    """Keeps the model and every client's centres.

    Before the first training there is nothing to send.
    """

    state = ("model", "generator", "centres")

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation)
        self.model = self.drawn_model(self.card.arch, self.card.input_shape)
        self.model.to(server_device(self.settings.machine))
        self.generator = torch.Generator().manual_seed(self.seed)
        self.centres: dict[str, Prototypes] = {}

    def payload_down(self) -> Payload:
        return Payload(weights=self.global_weights if self.centres else None)

    @property
    def global_weights(self) -> StateDict:
        return {name: value.cpu() for name, value in self.model.state_dict().items()}

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        """Train the model on the last centres of every client that has ever sent any."""
        self.centres |= vectors_of(uploads)
        centres = Prototypes.joined(self.centres[site] for site in sorted(self.centres))
        mean_loss = self._train_on(centres)
        return {"server-loss": mean_loss, "centres": float(len(centres))}

    def most_vectors(self, upload: Upload) -> float:
        """Return ρ · n and one more for each class: Σ_c ⌈ρ · n_c⌉ is no larger."""
        num_classes = len(self.federation.cards[upload.site].present)
        # rounded, as the product may be a little off the exact number
        return round(self.hparams.sample_ratio * upload.train_samples + num_classes, 6)

    def _train_on(self, centres: Prototypes) -> float:
        """Train g∘h on the centres, and return the mean loss of the last epoch."""
        on_cuda = next(self.model.parameters()).is_cuda
        optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=self.hparams.server_lr,
            capturable=on_cuda,  # counts its steps on the GPU
        )
        self.model.train()
        mean_loss = train(
            loss_of(self.task, self.model),
            (centres.means, centres.labels),
            optimizer,
            self.hparams,
            self.generator,
            min_rows=2,  # For batch normalisation
        )
        self.model.eval()
        return mean_loss
