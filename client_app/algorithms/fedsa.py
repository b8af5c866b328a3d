"""FedSA, client half: draw features to semantic anchors that all clients share.

Source: Zhou et al., "A Unified Representation Learning via Semantic Anchors", AAAI 2025.
Other half: `server_app/strategies/fedsa.py`.
Symbols: A [C, D] the anchors; z = f(x) features; g the head; P_i this client's own prototypes of
its last round; φ the Euclidean distance; d(X) = mean over classes k of min over l ≠ k of
φ(X^k, X^l).

Loss                L = CE + ``regularization`` · L_R + ``contrast`` · L_MCL
                        + ``calibration`` · L_CC
                    L_R = mean of (z − A^y)² over batch and dimensions
                    L_MCL = −log [ e^{−(φ(z, A^y) + δ)}
                                   / ( e^{−(φ(z, A^y) + δ)} + Σ_{c≠y} e^{−φ(z, A^c)} ) ],
                    δ = max(d(A), d(P_i))
                    L_CC = mean over all classes c of CE(g(A^c), c)
Upload              P_i^c = mean of z over this client's training samples of class c, after training
Inference           the label of the nearest global prototype in L2;
                    the head's prediction is reported beside it

Down: anchors and global prototypes. Up: local prototypes, never how many samples stand behind them.
Stays: model and own prototypes.

Deviations: the equations are those of the authors' code. There the features of P_i^c are those met
in training, from models that change with every batch. A client that has not trained, or has one
class, has d(P_i) = 0.
"""

import torch

from client_app.algorithms.base import (
    Batch,
    ClientAlgorithm,
    LossTerms,
    Payload,
    Prototypes,
    by_class,
)
from protofl_common.algorithms.fedsa import FedSAHparams
from protofl_common.maths.losses import margin_contrast, nearest_distances


class FedSA(ClientAlgorithm[FedSAHparams]):
    """Cross-entropy plus three terms of the anchors."""

    state: tuple[str, ...] = ("model", "own_prototypes")
    needs_gradients = True  # the head is used twice
    own_prototypes: Prototypes | None = None

    def receive(self, payload: Payload) -> None:
        """Keep the global prototypes and the anchors, and set the margin of the contrast.

        The margin is the mean distance of an anchor to the nearest other one, or that of this
        client's own last prototypes if it is larger.
        """
        super().receive(payload)
        anchors = payload.vectors("anchors")
        if anchors is None:
            return
        self.anchors_CD, _ = by_class(anchors.to(self.client.device), self.client.num_classes)
        self.margin = float(nearest_distances(self.anchors_CD).mean())
        if self.own_prototypes is not None:
            own_margin = float(nearest_distances(self.own_prototypes.means).mean())
            self.margin = max(self.margin, own_margin)

    @property
    def all_classes(self) -> torch.Tensor:
        """The classes of the anchors, [C]."""
        return torch.arange(len(self.anchors_CD), device=self.anchors_CD.device)

    def loss(self, batch: Batch) -> LossTerms:
        """Return the cross-entropy, and those terms of the anchors whose weights are above 0.

        Regularization draws features to the anchor of their class, contrast tells them from other
        anchors, and calibration teaches the head the anchors' classes.
        """
        terms = super().loss(batch)
        hparams = self.hparams
        anchors_CD = self.anchors_CD
        features_MD, classes_M = self.task.assigned(batch.features, batch.labels)
        if hparams.regularization > 0:
            distance = (features_MD - anchors_CD[classes_M]).square().mean()
            terms["regularization"] = hparams.regularization * distance
        if hparams.contrast > 0:
            rivals_MC = self.task.rivals(classes_M, self.all_classes)
            contrast = margin_contrast(features_MD, classes_M, anchors_CD, self.margin, rivals_MC)
            terms["contrast"] = hparams.contrast * contrast
        if hparams.calibration > 0:
            labels_C = self.task.labels_of(self.all_classes)
            calibration = self.task.loss(self.model.head(anchors_CD), labels_C)
            terms["calibration"] = hparams.calibration * calibration
        return terms

    def upload(self) -> Payload:
        """Return the local prototypes, and keep them for the next round's margin."""
        prototypes = self.local_prototypes()
        self.own_prototypes = prototypes.without_counts()
        return Payload(prototypes=prototypes)
