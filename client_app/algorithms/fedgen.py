"""FedGen, client half: the shared head also learns from features that a generator makes.

Source: Zhu et al., ICML 2021.
Other half: `server_app/strategies/fedgen.py`.
Symbols: f_k the body of client k, of any architecture; θ the head (predictor), which all share; G_w
the generator; p̂ the distribution of labels over the clients of the last round; λ = ``lambda``;
B = ``batch-size``.

Start of a round    θ, G_w and p̂ as the server has them
Training            CE(θ(f_k(x)), y) over the batch + λ · CE(θ(G_w(ε, ŷ)), ŷ) over B generated
                    features, ŷ ~ p̂, ε ~ N(0, I); G_w is fixed, in evaluation mode
Upload              θ after training, and how many training samples the client has of each class
Inference           θ(f_k(x)), with the head just received

Down: θ, G_w, the sum of the label counts. Up: θ, label counts. Stays: f_k.

Deviations: there is no second term in the first round, whose generator has learned nothing. Counted
are all labelled training samples, not those of the batches. The authors' code has λ = 10, times
0.98 each round, and a further term, by which a sample's prediction follows that of generated
features of its label.
"""

import torch

from client_app.algorithms.base import Batch, ClientAlgorithm, ClientView, LossTerms, Payload
from protofl_common.algorithms.fedgen import FedGenHparams
from protofl_common.models.split import Generator


class FedGen(ClientAlgorithm[FedGenHparams]):
    """FedAvg's client, but only the head is shared, and learns from the generator too."""

    label_counts: torch.Tensor | None = None

    def __init__(self, client: ClientView, round_number: int) -> None:
        super().__init__(client, round_number)
        # with λ the loss uses the head twice, which the fused optimizer step does not support
        self.needs_gradients = self.hparams.lambda_ > 0
        feature_dim = self.settings.model.feature_dim
        # any seed would do: the server sends the generator's weights
        generator = Generator(client.num_classes, feature_dim, self.hparams.noise_dim, seed=0)
        self.generator = generator.to(client.device).eval()

    def receive(self, payload: Payload) -> None:
        super().receive(payload)
        counts_C = payload.counts("label_counts")
        if counts_C is not None:
            self.label_counts = counts_C.to(self.client.device)

    def loss(self, batch: Batch) -> LossTerms:
        """Return the cross-entropy of the batch, and λ times that of generated features.

        These come from the server's generator, for labels drawn as often as all clients have them.
        In the first round, whose generator has learned nothing, no label counts are sent.
        """
        terms = super().loss(batch)
        if self.label_counts is not None and self.hparams.lambda_ > 0:
            with torch.no_grad():  # the generator is fixed
                batch_size = self.training.batch_size
                features_BD, classes_B = self.generator.sample(self.label_counts, batch_size)
            logits_BC = self.model.head(features_BD)
            labels = self.task.labels_of(classes_B)
            terms["generated"] = self.hparams.lambda_ * self.task.loss(logits_BC, labels)
        return terms

    def upload(self) -> Payload:
        classes_M = self.task.classes_of(self.client.train_set.labels.cpu())
        counts_C = self.privacy.class_counts(classes_M, self.client.num_classes)
        return Payload(weights=self.weights(), label_counts=counts_C)
