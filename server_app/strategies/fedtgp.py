"""FedTGP (Zhang et al., AAAI 2024), server half: global prototypes, trained apart by a margin.

Other half: FedProto's client, `client_app/algorithms/fedproto.py`.
Symbols: λ = ``lambda``; Ṕ^c ∈ R^D a trainable vector per class; F = FC(D, D) → ReLU → FC(D, D);
P̂^c = F(Ṕ^c) what goes down; P_i^c the round's client prototypes (`samples_PD`); Q^c their
unweighted mean per class; S = `server-epochs`; φ the Euclidean distance.

Client (Eq. 11)     CE + λ · E_c φ(P_i^c, P̂^c), over the batch's classes; P_i^c of the batch, too
Upload              P_i^c = mean of f(x) over the training samples of class c, after training
Inference           the label of the nearest P̂^c in L2; the head's prediction is reported beside it
Margin (Eq. 9)      δ(t) = min( max_{c≠c'} φ(Q^c, Q^c'), τ )
Loss (Eq. 10)       −log [ e^{−(φ(P_i^c, P̂^c)+δ)}
                           / ( e^{−(φ(P_i^c, P̂^c)+δ)} + Σ_{c'≠c} e^{−φ(P_i^c, P̂^{c'})} ) ]
Training            S epochs of plain SGD over the round's P_i^c, in shuffled minibatches

Down: P̂. Up: P_i^c, *without* how many samples stand behind them. Stays: the model.

Deviations: classes that nobody has, of which the paper says nothing, take no part in the loss and
are not sent. Ṕ and F live on, and so do prototypes that nobody sent this time. ``margin =
"nearest"`` is the authors' code: the largest distance of a Q^c to its nearest neighbour.
``merging`` may leave out P_i^c unlike the others. The authors upload those before the round.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from protofl_common.algorithms.base import ServerTrainingHparams
from protofl_common.algorithms.fedtgp import FedTGPHparams
from protofl_common.maths.losses import margin_contrast, nearest_distances
from protofl_common.maths.prototypes import class_means
from protofl_common.models.devices import seeded
from server_app.learning.training import server_device, train
from server_app.strategies.base import Federation, Prototypes, ServerStrategy, Upload, all_vectors

T = TypeVar("T", bound=ServerTrainingHparams)
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # (P_i^c [B, D], their rows of P̂, P̂ [K, D])


class TrainedPrototypes(ServerStrategy[T]):
    """Keeps Ṕ, F and which classes have been seen; in the first round there is nothing to send."""

    state = ("vectors_CD", "transform", "optimizer", "generator", "seen_C")

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation)
        dim = self.settings.model.feature_dim
        device = server_device(self.settings.machine)
        with seeded(self.seed):
            self.vectors_CD = nn.Parameter(torch.randn(self.num_classes, dim).to(device))
            self.transform = self.network(dim).to(device)
        self.generator = torch.Generator().manual_seed(self.seed)
        trained = [self.vectors_CD, *self.transform.parameters()]
        self.optimizer = torch.optim.SGD(trained, lr=self.hparams.server_lr)
        self.seen_C = torch.zeros(self.num_classes, dtype=torch.bool)

    def network(self, dim: int) -> nn.Module:
        """Return F, the network that turns the trainable vectors Ṕ into prototypes P̂."""
        return nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))

    @property
    def prototypes(self) -> Prototypes | None:  # type: ignore[override]
        """P̂ of the classes that clients have sent so far; None before the first round."""
        if not self.seen_C.any():
            return None
        with torch.no_grad():
            labels_K = torch.nonzero(self.seen_C).flatten()
            return Prototypes(self.transform(self.vectors_CD[labels_K]).cpu(), labels_K)

    def train_on(self, samples_PD: Tensor, labels_P: Tensor, loss: Loss) -> float:
        """Train Ṕ and F of the K classes seen so far; return the mean loss of the last epoch."""
        self.seen_C[labels_P] = True
        rows_P = (self.seen_C.cumsum(0) - 1)[labels_P]  # the place of each label among the K
        labels_K = torch.nonzero(self.seen_C).flatten().to(self.vectors_CD.device)

        def batch_loss(samples_BD: Tensor, rows_B: Tensor) -> Tensor:
            return loss(samples_BD, rows_B, self.transform(self.vectors_CD[labels_K]))

        samples = (samples_PD, rows_P)
        num_seen = len(labels_K)  # Each step puts as many rows through F, whatever its minibatch
        return train(
            batch_loss, samples, self.optimizer, self.hparams, self.generator, forward_rows=num_seen
        )


class FedTGP(TrainedPrototypes[FedTGPHparams]):
    """Trains the global prototypes by the contrast with a margin."""

    def network(self, dim: int) -> nn.Module:
        """Return F, or the identity if the setting ``transform`` is off."""
        return super().network(dim) if self.hparams.transform else nn.Sequential()

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        """Train P̂ on the clients' prototypes (Eq. 10); return the mean loss and the margin δ."""
        samples_PD, labels_P = all_vectors(uploads)
        margin = self.margin(samples_PD, labels_P)
        self.seen_C[labels_P] = True  # So that they are among the rivals
        labels_K = torch.nonzero(self.seen_C).flatten().to(self.vectors_CD.device)
        rivals_KK = self.task.rivals(labels_K, labels_K)

        def loss(samples_BD: Tensor, rows_B: Tensor, targets_KD: Tensor) -> Tensor:  # Eq. 10
            return margin_contrast(samples_BD, rows_B, targets_KD, margin, rivals_KK[rows_B])

        return {"server-loss": self.train_on(samples_PD, labels_P, loss), "margin": margin}

    def margin(self, samples_PD: Tensor, labels_P: Tensor) -> float:
        """Return δ of the round (Eq. 9), or what an ablation (setting ``margin``) has instead."""
        kind = self.hparams.margin
        threshold = self.hparams.margin_threshold  # τ
        constants = {"none": 0.0, "fixed": threshold}
        if kind in constants:
            return constants[kind]
        centres_KD = class_means(samples_PD, labels_P, self.num_classes).means  # Q
        if len(centres_KD) < 2:  # Nothing to keep apart
            return 0.0
        if kind == "nearest":
            return min(float(nearest_distances(centres_KD).max()), threshold)
        return min(float(torch.cdist(centres_KD, centres_KD).max()), threshold)
