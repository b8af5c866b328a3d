"""FML, client half: a private model and a shared one teach each other.

Source: Shen et al., "Federated Mutual Learning", 2020.
Other half: `server_app/strategies/fedavg.py`; the server is FedAvg's, of the meme models.
Symbols: p the private model's class probabilities, q those of the meme model, which all clients
share; α, β.

Private loss        L_p = α · CE(p, y) + (1 − α) · KL(q ‖ p)
Meme loss           L_q = β · CE(q, y) + (1 − β) · KL(p ‖ q)
Both are minimised together, each with the other's probabilities as fixed targets.
Inference           the private model

Down and up: the weights of the meme model. Stays: the private model, of any architecture.

Deviations: ``mutual = "coupled"`` is HtFLlib's code: targets are not fixed, so both losses move
both models, and the divergence is a mean over samples and classes, which makes it C times weaker.
"""

from torch import Tensor

from client_app.algorithms.base import Batch, ClientAlgorithm, ClientView, LossTerms
from protofl_common.algorithms.fml import FMLHparams
from protofl_common.maths.losses import divergence


class FML(ClientAlgorithm[FMLHparams]):
    """Two models with one optimizer."""

    trains: tuple[str, ...] = ("model", "meme")

    def __init__(self, client: ClientView, round_number: int) -> None:
        super().__init__(client, round_number)
        arch = self.settings.architecture(0, self.hparams.meme)  # the same for all clients
        self.meme = client.new_model(arch, "global")

    def loss(self, batch: Batch) -> LossTerms:
        """Return the loss terms of the private model and of the meme model, minimised together.

        Each has a cross-entropy and, if its weight is below 1, the divergence from the other model.
        """
        # one labelled sample among unlabelled ones: batch normalisation cannot train on it alone
        self.meme.train(self.client.train_set.unlabelled is None or len(batch.labels) > 1)
        own_BC = batch.logits
        meme_BC = self.meme(batch.inputs)
        hparams = self.hparams
        terms = {
            "cross-entropy": hparams.alpha * self.task.loss(own_BC, batch.labels),
            "meme-cross-entropy": hparams.beta * self.task.loss(meme_BC, batch.labels),
        }
        if hparams.alpha < 1:
            terms["mutual"] = (1 - hparams.alpha) * self._divergence(meme_BC, own_BC)
        if hparams.beta < 1:
            terms["meme-mutual"] = (1 - hparams.beta) * self._divergence(own_BC, meme_BC)
        return terms

    def _divergence(self, target_BC: Tensor, logits_BC: Tensor) -> Tensor:
        """Return KL(target ‖ logits); the target is fixed, unless ``mutual = "coupled"``."""
        if self.hparams.mutual == "coupled":  # HtFLlib's, a mean over classes too
            return divergence(logits_BC, target_BC) / logits_BC.shape[1]
        return divergence(logits_BC, target_BC.detach())
