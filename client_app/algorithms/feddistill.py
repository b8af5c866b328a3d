"""FedDistill (FD), client half: learn from the mean outputs of the other clients, class by class.

Source: Jeong et al., "Communication-Efficient On-Device Machine Learning", 2018.
Other half: `server_app/strategies/feddistill.py`.
Symbols: F(x) the class probabilities of a sample, the softmax of its logits; φ(p, q) = −Σ_c q_c log
p_c; F̂_ℓ the other clients' mean F over samples of class ℓ, the teacher; γ = ``gamma``.

Loss (Alg. 1)       φ(F(x), y) + γ · φ(F(x), F̂_y)
Upload              F̄_ℓ = mean of F(x) over the samples of class ℓ,
                    as they were seen in this round's training
Inference           the head

Down: F̂, this client's own. Up: F̄, never how many samples stand behind it. Stays: the model, of
any architecture.

Deviations: a class of which no other client has sent F̄ has no teacher, and so no second term; in
the first round none has. ``outputs = "logits"`` is HtFLlib's code, as FedTGP compares with: F(x)
are the logits themselves, the teacher is the mean over all clients, this one too, and φ the squared
distance, averaged over classes. Federated augmentation, the paper's other half, is not there.
"""

import torch
from torch import Tensor
from torch.nn.functional import one_hot, softmax

from client_app.algorithms.base import (
    Batch,
    ClientAlgorithm,
    ClientView,
    LossTerms,
    Payload,
    Prototypes,
    by_class,
)
from protofl_common.algorithms.feddistill import FedDistillHparams
from protofl_common.maths.losses import class_distillation, prototype_alignment


class FedDistill(ClientAlgorithm[FedDistillHparams]):
    """Cross-entropy plus γ times the distance to the teacher.

    While it trains, it sums up the model's outputs by class for the upload.
    """

    teacher: tuple[Tensor, Tensor] | None = None
    """F̂ by class [C, C], and which classes have one [C]; None in the first round."""

    def __init__(self, client: ClientView, round_number: int) -> None:
        super().__init__(client, round_number)
        classes = client.num_classes
        device = client.device
        # in this round's training so far: the sum of the outputs for the samples of each class, the
        # number of these samples, and which of the client's N samples they are
        self.sums_CC = torch.zeros(classes, classes, dtype=torch.float64, device=device)
        self.counts_C = torch.zeros(classes, dtype=torch.int64, device=device)
        self.seen_N = torch.zeros(len(client.train_set), dtype=torch.bool, device=device)

    def receive(self, payload: Payload) -> None:
        super().receive(payload)
        outputs = payload.vectors("outputs")
        if outputs is not None:
            self.teacher = by_class(outputs.to(self.client.device), self.client.num_classes)

    def loss(self, batch: Batch) -> LossTerms:
        """Return the cross-entropy, and γ times the distance to the teacher if there is one.

        Also add the model's outputs on the batch to the sums by class, for the upload.
        """
        outputs_BC = batch.logits.detach().double()
        if self.hparams.outputs == "probabilities":
            outputs_BC = softmax(outputs_BC, dim=1)
        labels_BC = one_hot(batch.labels, len(self.counts_C))
        self.sums_CC += labels_BC.double().T @ outputs_BC  # each output to the row of its class
        self.counts_C += labels_BC.sum(0)
        self.seen_N[batch.index] = True

        terms = super().loss(batch)
        if self.teacher is not None and self.hparams.gamma > 0:
            terms["distillation"] = self.hparams.gamma * self._distance(batch, *self.teacher)
        return terms

    def _distance(self, batch: Batch, teacher_CC: Tensor, mask_C: Tensor) -> Tensor:
        """Return the batch's distance to the teacher, over the classes that have one (the mask)."""
        if self.hparams.outputs == "logits":
            return prototype_alignment(
                batch.logits, batch.labels, teacher_CC, mask_C, "mse", "sample"
            )
        return class_distillation(batch.logits, batch.labels, teacher_CC, mask_C)

    def upload(self) -> Payload:
        """Return the mean output of each class, with the number of different samples behind it."""
        labels_P = torch.nonzero(self.counts_C).flatten()
        means_PC = self.sums_CC[labels_P] / self.counts_C[labels_P].unsqueeze(1)

        # `counts_C` has a sample once for every epoch
        labels_seen = self.client.train_set.labels[self.seen_N]
        samples_P = self.task.class_counts(labels_seen)[labels_P]
        outputs = Prototypes(means_PC.float().cpu(), labels_P.cpu(), samples_P.cpu())
        return Payload(outputs=outputs)
