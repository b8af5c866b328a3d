"""The one shape that every client model has, body and head, and modules beside it.

Heads z -> logits are one linear layer, or two; trainable, or with fixed directions of the classes.
The last layer of every head is ``weight`` [C, H] and ``bias`` [C], and a head without a hidden
layer has nothing else (H = D), so heads of such models can be exchanged whatever their bodies.
Beside the heads stand SCAFFOLD's control variates, FedDBE's mean feature and FedGen's generator.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protofl_common.models.devices import seeded


class SplitModel(nn.Module):
    """A model that is cut at its features.

    ``body`` x [B, …] -> z [B, D], ``head`` z -> logits [B, C].
    """

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


def control_variate(model: nn.Module) -> nn.ParameterList:
    """Return a first control variate: zeros in the shapes of the model's trainable parameters."""
    zeros = nn.ParameterList()
    for parameter in model.parameters():
        if parameter.requires_grad:
            zeros.append(nn.Parameter(torch.zeros_like(parameter), requires_grad=False))
    return zeros


def variate_changes(
    gradient_sums: Sequence[Tensor], steps: Tensor, variate: nn.ParameterList
) -> list[Tensor]:
    """Return SCAFFOLD's Δc_i (Eq. 4): the mean gradient of a round's steps, less the variate c_i.

    ``steps`` is their number K, a scalar; with no step Δc_i is 0.
    """
    pairs = zip(gradient_sums, variate, strict=True)
    return [total / steps.clamp(min=1) - own * (steps > 0) for total, own in pairs]


def gradient_changes(
    trained: Sequence[Tensor], received: Sequence[Tensor], alpha: float
) -> list[Tensor]:
    """Return by how much FedDyn's gradient g_k changes in a round: −α (θ_k − θ^t).

    ``trained`` are the parameters θ_k after it, ``received`` θ^t those before it.
    """
    pairs = zip(trained, received, strict=True)
    return [-alpha * (parameter.detach() - before) for parameter, before in pairs]


class LinearHead(nn.Linear):
    """z [B, D] -> logits [B, C], with dropout on z while training.

    ``weight`` [C, D], ``bias`` [C].
    """

    dropout = 0.0

    def forward(self, input: Tensor) -> Tensor:
        if self.dropout:
            input = F.dropout(input, self.dropout, self.training)
        return super().forward(input)


class HiddenHead(LinearHead):
    """A head of two layers with a ReLU between them.

    ``hidden.weight`` [H, D], ``hidden.bias`` [H]; ``weight`` [C, H], ``bias`` [C]. These are the
    deeper heads of HtC4 (FedTGP, Zhang et al., AAAI 2024), without the ReLU that its authors' code
    has on the logits as well, which we take for a slip. Dropout, if any, is on the hidden units.
    """

    def __init__(self, feature_dim: int, hidden: int, num_classes: int) -> None:
        super().__init__(hidden, num_classes)
        self.hidden = nn.Linear(feature_dim, hidden)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(F.relu(self.hidden(input)))


class CosineHead(nn.Module):
    """FedNH's head: s · cos(w_c, z), z [B, D] -> [B, C], with a trained ``scale`` s.

    The rows w_c of ``weight`` [C, D] are the class prototypes: of length 1, not trained, and no
    part of the state dict.
    """

    weight: Tensor

    def __init__(self, classes: int, width: int, scale: float) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(classes, width), persistent=False)
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, input: Tensor) -> Tensor:
        return self.scale * (F.normalize(input) @ self.weight.T)


def class_directions(classes: int, width: int) -> Tensor:
    """Draw directions of the classes from torch's global generator: [C, H], rows of length 1.

    They are orthogonal where C ≤ H = ``width``, else spread evenly over the sphere.
    """
    if classes <= width:
        return nn.init.orthogonal_(torch.empty(classes, width))
    rows = F.normalize(torch.randn(classes, width))
    # gradient descent on Σ_{i≠j} exp(κ cos(u_i, u_j)): the rows repel one another; the larger κ,
    # the more the nearest ones alone
    for kappa in torch.linspace(1, 20, steps=200):
        # the −1 keeps exp small, and cancels in the quotient
        push = torch.exp(kappa * (rows @ rows.T - 1)).fill_diagonal_(0)
        step_sizes = 0.9 / kappa * (push / push.sum(1, keepdim=True))
        rows = F.normalize(rows - step_sizes @ rows)
    return rows


def first_layer(head: nn.Module) -> nn.Linear:
    """Return the layer of a `LinearHead` or `HiddenHead` whose inputs are the features."""
    layer = head.hidden if isinstance(head, HiddenHead) else head
    assert isinstance(layer, nn.Linear)
    return layer


class FeatureMean(nn.Module):
    """A running mean of features [D], and of how many batches it is (FedDBE)."""

    mean: Tensor
    num_batches_tracked: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def updated(self, features_BD: Tensor, momentum: float) -> Tensor:
        """Move the mean towards a batch's by the part ``momentum``, and return it.

        Gradients flow through the result to this batch's features, but not to earlier batches.
        """
        mean_D = self.mean.lerp(features_BD.mean(dim=0), momentum)
        self.mean = mean_D.detach()
        self.num_batches_tracked += 1
        return mean_D


class Generator(nn.Module):
    """FedGen's generator of features: noise and labels (ε, y) -> z [B, D].

    [ε, one-hot y] -> fc D, batch norm, ReLU -> fc D: the authors' network (Zhu et al., ICML 2021)
    as FedTGP (Zhang et al., AAAI 2024) compares with it, whose hidden layer is as wide as the
    features. ε has ``noise_dim`` numbers. The first weights follow from ``seed``.
    """

    def __init__(self, num_classes: int, feature_dim: int, noise_dim: int, seed: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.noise_dim = noise_dim
        with seeded(seed):
            self.hidden = nn.Linear(noise_dim + num_classes, feature_dim)
            self.norm = nn.BatchNorm1d(feature_dim)
            self.out = nn.Linear(feature_dim, feature_dim)
        # batch norm cancels this bias; Adam would follow the rounding of its gradient
        self.hidden.bias.requires_grad_(False)

    def forward(self, noise_BN: Tensor, labels_B: Tensor) -> Tensor:
        labels_BC = F.one_hot(labels_B, self.num_classes).to(noise_BN.dtype)
        hidden_BD = self.hidden(torch.cat([noise_BN, labels_BC], dim=1))
        features_BD: Tensor = self.out(torch.relu(self.norm(hidden_BD)))
        return features_BD

    def sample(
        self, counts_C: Tensor, size: int, random: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Generate features [size, D], and draw their labels [size] in proportion to ``counts_C``.

        Labels and the noise ε ~ N(0, 1) come from ``random``, or from torch's global generator.
        """
        labels_B = torch.multinomial(counts_C.double(), size, replacement=True, generator=random)
        noise_BN = torch.randn(size, self.noise_dim, generator=random, device=counts_C.device)
        return self(noise_BN, labels_B), labels_B
