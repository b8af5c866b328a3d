"""FedGen (Zhu et al., ICML 2021), server half: the mean of the heads, and a generator of features.

Other half: `client_app/algorithms/fedgen.py`.
Symbols: θ_k the head of client k; n_k its training samples; c_k its label counts [C]; G_w the
generator, which is trained on what the heads know.

Heads               θ ← Σ_k (n_k / Σ n) · θ_k over the round's clients
Labels              p̂(y) ∝ Σ_k c_k(y)
Generator           min_w E_{y ~ p̂, ε ~ N(0, I)} CE(Σ_k (n_k / Σ n) · θ_k(G_w(ε, y)), y):
                    ``server-steps`` steps of Adam

Deviations: the paper averages heads and their logits without weights. The mean of the logits of
heads of one layer is the logits of their mean, so θ stands in for the ensemble, with ``merging``
and ``max-update-ratio`` as the run has them; for heads of two layers this is an approximation. The
authors' code also has a term for diverse features, weighs each client's loss by its share of the
label, and draws all labels that occur alike.
"""

import torch

from protofl_common.algorithms.fedgen import FedGenHparams
from protofl_common.models.split import Generator
from server_app.strategies.base import Federation, Payload, Upload
from server_app.strategies.fedavg import FedAvg


class FedGen(FedAvg[FedGenHparams]):
    """Keeps the head, the generator with its optimizer, and the last round's label counts."""

    state = ("weights", "generator", "optimizer", "random", "label_counts")
    label_counts: torch.Tensor | None = None

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation)
        feature_dim = self.settings.model.feature_dim
        self.generator = Generator(self.num_classes, feature_dim, self.hparams.noise_dim, self.seed)
        trained = [
            parameter for parameter in self.generator.parameters() if parameter.requires_grad
        ]
        self.optimizer = torch.optim.Adam(trained, lr=self.hparams.server_lr)
        self.random = torch.Generator().manual_seed(self.seed)

    def payload_down(self) -> Payload:
        generator = None if self.label_counts is None else self.generator.state_dict()
        return Payload(weights=self.weights, generator=generator, label_counts=self.label_counts)

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        """Average the heads, add up the label counts, and train the generator by both."""
        super().merge(uploads)
        counts = []
        for upload in uploads:
            sent_C = upload.payload.counts("label_counts")
            if sent_C is not None:
                counts.append(sent_C)
        self.label_counts = torch.stack(counts).sum(dim=0)
        return {"server-loss": self._train_generator(self.label_counts)}

    def _train_generator(self, counts_C: torch.Tensor) -> float:
        """Train G_w for ``server-steps``, and return the mean loss.

        The mean head must recognise the generated features. Labels are drawn by ``counts_C``.
        """
        model = self.first_model().requires_grad_(False).eval()
        model.load_state_dict(self.weights)
        batch_size = self.hparams.server_batch_size
        total = 0.0
        for _ in range(self.hparams.server_steps):
            features_BD, classes_B = self.generator.sample(counts_C, batch_size, self.random)
            loss = self.task.loss(model.head(features_BD), self.task.labels_of(classes_B))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total += loss.item()
        return total / self.hparams.server_steps
