"""FML, two rounds: private models of different architectures.

The divergences by hand, in float64, of probabilities.
"""

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
        """Return L_p + L_q, the losses of the private model and of the meme.

        Each is its cross-entropy and its divergence from the other, weighted by α, or by β.
        """
        alpha = self.hparams.alpha
        beta = self.hparams.beta
        private = self.private(self.x[batch]).double()
        meme = self.meme(self.x[batch]).double()
        p_BC = torch.softmax(private, dim=1)
        q_BC = torch.softmax(meme, dim=1)

        labels = self.labels(batch)
        of_private = alpha * plain.cross_entropy(private, labels)
        of_private = of_private + (1 - alpha) * self.divergence(q_BC, p_BC)
        of_meme = beta * plain.cross_entropy(meme, labels)
        of_meme = of_meme + (1 - beta) * self.divergence(p_BC, q_BC)
        return of_private + of_meme

    def divergence(self, target: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """Return KL(target ‖ found) = Σ_c target_c log(target_c / found_c), a mean over the batch.

        "coupled", as in HtFLlib, it is divided by C too, and the target has a gradient.
        """
        if self.hparams.mutual == "coupled":
            return (target * torch.log(target / found)).mean()
        target = target.detach()
        return (target * torch.log(target / found)).sum() / len(target)


@pytest.mark.parametrize(
    ("alpha", "beta", "mutual"), [(0.5, 0.5, "detached"), (0.3, 0.8, "coupled")]
)
def test_two_rounds_equal_an_independent_script(alpha, beta, mutual, tmp_path):
    """The global meme, and the private models of three architectures, are the script's."""
    settings = {
        "fml__alpha": alpha,
        "fml__beta": beta,
        "fml__mutual": mutual,
        "fml__meme": MEME,
        "liars": 0,
        **plain.TINY,
    }
    outcome, clients = plain.side_by_side(
        tmp_path, FMLClient, plain.HETEROGENEOUS, algo="fml", **settings
    )

    weights = plain.after_rounds(clients, plain.copied(clients[0].meme))

    plain.assert_weights_left(outcome, weights)
    plain.assert_models_left(outcome, clients, own="private")
    assert len({card["arch"] for card in outcome.summary["clients"].values()}) == 3
