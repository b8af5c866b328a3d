"""FML, two rounds: private models of different architectures.

The divergences by hand, in float64, of probabilities.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import plain
from tests.support.declaration import Declared

DECLARED = Declared(
    weights=True,
    of="meme",
    losses=("cross-entropy", "mutual", "meme-cross-entropy", "meme-mutual"),
    acts={"alpha": 0.9, "beta": 0.9, "meme": "htcnn-1", "mutual": "coupled"},
)

PRIVATE = ("cnn4", "htcnn-3", "htcnn-1")
MEME = "htcnn-1"


class FMLClient(plain.PlainClient):
    starts_alike = False

    def __init__(self, *facts: Any) -> None:
        super().__init__(*facts)
        self.private = self.model  # of its own architecture, before that of the meme is set
        self.arch = MEME
        self.meme = self.model_of("global")

    def train(self, number: int, weights: plain.State) -> plain.State:
        self.meme.load_state_dict(weights)
        self.sgd(number, torch.nn.ModuleList([self.private, self.meme]), self.loss)
        return plain.copied(self.meme)

    def loss(self, batch: list[int]) -> torch.Tensor:
        """L_p + L_q, sample by sample."""
        alpha = self.hparams.alpha
        beta = self.hparams.beta
        p_BC = torch.softmax(self.private(self.x[batch]).double(), dim=1)
        q_BC = torch.softmax(self.meme(self.x[batch]).double(), dim=1)
        total = torch.zeros((), dtype=torch.float64)
        for p, q, i in zip(p_BC, q_BC, batch, strict=True):
            label = self.y[i]
            total = total - alpha * torch.log(p[label]) - beta * torch.log(q[label])
            total = total + (1 - alpha) * self.divergence(q, p) + (1 - beta) * self.divergence(p, q)
        return total / len(batch)

    def divergence(self, target: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """KL(target ‖ found) = Σ_c target_c log(target_c / found_c), over C if it is coupled."""
        is_detached = self.hparams.mutual == "detached"
        if is_detached:
            target = target.detach()
        total = sum(target[c] * torch.log(target[c] / found[c]) for c in range(len(target)))
        return total if is_detached else total / len(target)


@pytest.mark.parametrize(
    ("alpha", "beta", "mutual"), [(0.5, 0.5, "detached"), (0.3, 0.8, "coupled")]
)
def test_two_rounds_equal_an_independent_script(
    alpha: float, beta: float, mutual: str, tmp_path: Path
) -> None:
    """The global meme, and the private models of three architectures, are the script's."""
    settings = {
        "fml__alpha": alpha,
        "fml__beta": beta,
        "fml__mutual": mutual,
        "fml__meme": MEME,
        "liars": 0,
        "feature_dim": 16,
        "lr": 0.02,
        "test_samples": 20,
        "train_samples": 25,
    }
    outcome, clients = plain.side_by_side(tmp_path, FMLClient, PRIVATE, algo="fml", **settings)

    weights = plain.two_rounds(clients, plain.copied(clients[0].meme))

    plain.assert_close(plain.weights_left(outcome), weights)
    models = {client.name: plain.copied(client.private) for client in clients}
    plain.assert_models_left(tmp_path, models)
    assert len({card["arch"] for card in outcome.summary["clients"].values()}) == len(PRIVATE)
