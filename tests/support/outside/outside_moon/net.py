"""A small transformer over patches, as ``arch = "outside_moon.net:TinyViT"``."""

import torch
from torch import Tensor, nn


class TinyViT(nn.Module):
    """Square images [B, channels, H, W] -> features [B, D].

    Patches of 7×7, one encoder layer, the mean of the tokens.
    """

    def __init__(self, input_shape: tuple[int, ...], feature_dim: int, patch: int = 7) -> None:
        super().__init__()
        channels, side, _ = input_shape
        self.patches = nn.Conv2d(channels, feature_dim, patch, stride=patch)
        self.position = nn.Parameter(torch.randn(1, (side // patch) ** 2, feature_dim) * 0.02)
        self.encoder = nn.TransformerEncoderLayer(
            feature_dim, 4, 2 * feature_dim, dropout=0.0, batch_first=True
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, channels, H, W] -> [B, D]."""
        tokens = self.patches(inputs).flatten(2).transpose(1, 2) + self.position
        features: Tensor = self.encoder(tokens).mean(dim=1)
        return features
