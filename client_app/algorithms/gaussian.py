"""Gaussian heads of frozen features in one round, client half.

Class moments go up, and of those of all clients a classifier is solved for.
Other half: `server_app/strategies/gaussian.py`.
Sources: FedCGS (Guan et al., "Capture Global Feature Statistics for One-Shot Federated Learning",
AAAI 2025, arXiv 2503.06962); the LDA of Gaussian heads (GH-OFL, arXiv 2602.01186).
Symbols: x = r(x) features of frozen backbones, side by side; π_c, m_c, S as in
`protofl_common/maths/gaussian.py`.

Upload         π_c, m_c and S of this client's training samples, as means over them
Head           argmax_c log π_c − ½ (x − μ_c)ᵀ Σ⁻¹ (x − μ_c),
               of the moments of all clients together; of several labels a sample, for each label
               that of the class with it less that of the class without it

Down: moments of all clients, and how many samples of each class these are. Up: moments. Stays: the
data; a client trains nothing. Moments are means, so the head is that of all features in one place,
however the classes are divided.

Deviations: covariances are shrunk by a formula (OAS) or by the setting, not by a search on
validation data; there is no refinement on samples drawn from the Gaussians (FisherMix), and no
random projection.
"""

import torch

from client_app.algorithms.base import ClientAlgorithm, ClientView, Payload, SplitModel
from protofl_common.algorithms.gaussian import GaussianHparams
from protofl_common.config.architectures import GAUSSIAN
from protofl_common.maths.gaussian import ClassMoments, GaussianHead


class Gaussian(ClientAlgorithm[GaussianHparams]):
    """Solves for the head anew whenever it receives moments; before, all classes are as likely."""

    state: tuple[str, ...] = ()

    def __init__(self, client: ClientView, round_number: int) -> None:
        super().__init__(client, round_number)
        self.moments = self._no_moments()
        self.head = GaussianHead(self.task.num_outputs, client.input_shape[0])
        self.model = SplitModel(torch.nn.Identity(), self.head).to(client.device)
        self.evaluation_arch = GAUSSIAN

    def receive(self, payload: Payload) -> None:
        """Compute the head from the moments of all clients, if these were sent.

        The prior of a class is its share among the samples of all clients, or of this one
        (``priors``).
        """
        super().receive(payload)
        counts_C = payload.counts("counts")
        if counts_C is None or "moments" not in payload.entries:
            return
        is_global = self.hparams.priors == "global"
        priors_C = (self.moments if is_global else self._own_moments()).shares
        if self.settings.privacy.dp != "none":  # the head cuts features as the moments' were cut
            self.head.longest.fill_(self.settings.privacy.dp_feature_clip)
        moments = self.moments.over_classes(self.task.classes_of_a_sample)
        self.head.cpu().fit(moments, counts_C, priors_C, self.hparams.shrinkage, self.task.combined)
        self.head.to(self.client.device)

    def upload(self) -> Payload:
        """Return the upload: the moments of this client's own samples."""
        self.moments = self._own_moments()  # the row's entry is made of this attribute
        return super().upload()

    def _no_moments(self) -> ClassMoments:
        return ClassMoments(self.client.num_classes, self.client.input_shape[0])

    def _own_moments(self) -> ClassMoments:
        """Return the moments of the training samples of large classes (``min-class-samples``)."""
        data = self.client.train_set
        features_ND = data.in_memory.cpu()
        labels = data.labels.cpu().numpy()
        # the labels of other classes become unlabelled
        labels_of_large = self.task.only_of(labels, self.client.large_classes.numpy())
        is_counted_N = torch.from_numpy(self.task.known(labels_of_large))
        counted = self.task.tensor(labels_of_large)[is_counted_N]
        # a row for each class of each sample: M of len(counted) samples
        features_MF, classes_M = self.task.assigned(features_ND[is_counted_N], counted)
        moments = self._no_moments()
        self.privacy.measure(moments, features_MF, classes_M, len(counted))
        return moments
