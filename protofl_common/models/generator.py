"""FedGen's generator: features of a class, made of noise.

Source: the authors' network (Zhu et al., ICML 2021) as FedTGP (Zhang et al., AAAI 2024) compares with it: its hidden
layer is as wide as the features, D. Symbols: B samples, C classes, N numbers of noise.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from protofl_common.basics.devices import seeded


class Generator(nn.Module):
    """(ε, y) -> z [B, D]: [ε, one-hot y] -> fc D, batch normalisation, ReLU -> fc D; first weights from ``seed``."""

    def __init__(self, num_classes: int, feature_dim: int, noise_dim: int, seed: int) -> None:
        super().__init__()
        self.num_classes, self.noise_dim = num_classes, noise_dim
        with seeded(seed):
            self.hidden = nn.Linear(noise_dim + num_classes, feature_dim)
            self.norm = nn.BatchNorm1d(feature_dim)
            self.out = nn.Linear(feature_dim, feature_dim)
        self.hidden.bias.requires_grad_(False)  # normalisation takes it out; Adam would follow its gradient's rounding

    def forward(self, noise_BN: Tensor, labels_B: Tensor) -> Tensor:
        labels_BC = one_hot(labels_B, self.num_classes).to(noise_BN.dtype)
        features: Tensor = self.out(torch.relu(self.norm(self.hidden(torch.cat([noise_BN, labels_BC], dim=1)))))
        return features

    def sample(self, counts_C: Tensor, size: int, random: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Features [size, D], labels y ~ ``counts_C`` and noise ε ~ N(0, 1) drawn from ``random``, or torch's own."""
        labels_B = torch.multinomial(counts_C.double(), size, replacement=True, generator=random)
        noise_BN = torch.randn(size, self.noise_dim, generator=random, device=counts_C.device)
        return self(noise_BN, labels_B), labels_B
