"""Gaussian heads of frozen features in one round, client half: class moments go up, a classifier is solved for.

Other half: `server_app/strategies/gaussian.py`.
Sources: FedCGS (Guan et al., "Capture Global Feature Statistics for One-Shot Federated Learning", AAAI 2025,
arXiv 2503.06962) for ``lda``; Gaussian heads (GH-OFL, arXiv 2602.01186) for all three.
Symbols: x = r(x) features of frozen backbones, side by side; π_c, m_c, S as in `protofl_common/maths/gaussian.py`.

Upload         π_c, m_c and S of this client's training samples, as means over them
Head           argmax_c log π_c − ½ log |Σ_c| − ½ (x − μ_c)ᵀ Σ_c⁻¹ (x − μ_c), of the moments of all clients together

Down: moments of all clients, and how many samples of each class these are. Up: moments. Stays: the data; a client
trains nothing. Moments are means, so the head is that of all features in one place, however the classes are divided.

Deviations: covariances are shrunk by a formula (OAS) or by the setting, not by a search on validation data; there is no
refinement on samples drawn from the Gaussians (FisherMix), and no random projection.
"""

import torch

from client_app.algorithms.base import Client, ClientAlgorithm, Payload, SplitModel
from protofl_common.experiment.catalog import GaussianHparams
from protofl_common.maths.gaussian import ClassMoments, GaussianHead


class Gaussian(ClientAlgorithm[GaussianHparams]):
    """Solves for the head anew whenever it receives moments; before that all classes are as likely."""

    state: tuple[str, ...] = ()

    def __init__(self, client: Client, round_number: int) -> None:
        super().__init__(client, round_number)
        self.sizes = client.num_classes, client.input_shape[0], self.hparams.head
        self.moments, self.head = ClassMoments(*self.sizes), GaussianHead(*self.sizes)
        self.model = SplitModel(torch.nn.Identity(), self.head).to(client.device)
        self.evaluation_arch = f"gaussian-{self.hparams.head}"

    def receive(self, payload: Payload) -> None:
        super().receive(payload)
        if (counts_C := payload.counts("counts")) is None or "moments" not in payload.entries:
            return
        priors_C = self.moments.shares if self.hparams.priors == "global" else self._own_moments().shares
        if self.client.plan is not None:
            self.head.longest.fill_(self.settings.privacy.dp_feature_clip)
        self.head.cpu().fit(self.moments, counts_C, priors_C, self.hparams.shrinkage)
        self.head.to(self.client.device)

    def upload(self) -> Payload:
        """The moments of the training samples, without those of small classes (``min-class-samples``)."""
        self.moments = self._own_moments()
        return super().upload()

    def _own_moments(self) -> ClassMoments:
        data = self.client.train_set
        chosen_N = torch.isin(data.labels.cpu(), self.client.large_classes)
        moments = ClassMoments(*self.sizes)
        self.privacy.measure(moments, data.in_memory.cpu()[chosen_N], data.labels.cpu()[chosen_N])
        return moments
