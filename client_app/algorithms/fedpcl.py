"""FedPCL, client half: a projection of frozen features, trained by contrast with prototypes.

Source: Tan et al., NeurIPS 2022.
Other half: `server_app/strategies/fedpcl.py`.
Symbols: r(x) features of K frozen backbones, side by side (computed once per client:
`protofl_common/backbones`); z = h(r(x)) / ‖h(r(x))‖, h the projection network; C̄ global
prototypes; C_p client p's, filled up by C̄ for the classes that it lacks (Eq. 7); m clients; τ.

Loss (Eq. 10)       L = L_g + L_p, averaged over the batch
    (Eq. 8)         L_g = −log [ exp(z·C̄^(y)/τ) / Σ_{y_a ∈ A(y)} exp(z·C̄^(y_a)/τ) ]
    (Eq. 9)         L_p = 1/m Σ_p −log [ exp(z·C_p^(y)/τ) / Σ_{y_a ∈ A(y)} exp(z·C_p^(y_a)/τ) ]
Upload (Eq. 5)      C_i^(j) = mean of z over this client's training samples of class j,
                    after training
Inference           the most similar of the client's *own* prototypes

Down: C̄ and all C_p. Up: own prototypes and how many samples stand behind each. Stays: the
projection network.

Deviations: z and the prototypes have unit length (the authors' code; with the text's bare dot
products the loss has no lower bound). In the first round there are no prototypes yet, so only batch
normalisation sees the data. ``loss`` and ``prototypes`` are the ablations of Tables 5 and 6;
``denominator = "all"`` puts y into A(y). Under differential privacy C̄ predicts: a client's own
prototypes have no noise, and would shape the accuracies that it sends.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from client_app.algorithms.base import (
    Batch,
    ClientAlgorithm,
    ClientView,
    LossTerms,
    Payload,
    Prototypes,
    Samples,
    by_class,
)
from protofl_common.algorithms.fedpcl import FedPCLHparams
from protofl_common.maths.losses import prototype_contrast, supervised_contrast
from protofl_common.maths.prototypes import chosen


class FedPCL(ClientAlgorithm[FedPCLHparams]):
    """Contrast with the global and with every client's prototypes; prediction with its own."""

    similarity = "cosine"

    def __init__(self, client: ClientView, round_number: int) -> None:
        super().__init__(client, round_number)
        self.predicts_with_head = self.hparams.loss.startswith("ce")  # only these train the head

    def receive(self, payload: Payload) -> None:
        """Keep the global prototypes and, if they were sent, those of all clients, as tables.

        A client's set is completed by global prototypes of the classes that it lacks (Eq. 7).
        """
        super().receive(payload)
        self.tables: dict[str, tuple[Tensor, Tensor]] = {}
        global_set = payload.vectors()
        if global_set is None:
            return
        self.tables["global"] = self._table((global_set,))
        if payload.entries.get("local_sets"):
            completed = [own.completed_by(global_set) for own in payload.sets("local_sets")]
            self.tables["local"] = self._table(completed)

    def prototypes_for_prediction(self) -> Prototypes | None:
        """Return this client's own prototypes of large classes; under ``dp`` the global ones."""
        if self.settings.privacy.dp != "none":
            return super().prototypes_for_prediction()
        own = self.local_prototypes()
        return chosen(own, self.client.large_classes).to(self.client.device)

    def loss(self, batch: Batch) -> LossTerms:
        """Return the loss of Eq. 10, or that of an ablation (``loss``)."""
        hparams = self.hparams
        labels_B = batch.labels
        z_BD = normalize(batch.features, dim=1)
        if hparams.loss == "supcon":
            return {"contrast": supervised_contrast(z_BD, labels_B, hparams.temperature)}
        if hparams.loss == "contrast":
            return self._contrast(z_BD, labels_B)

        terms = {"cross-entropy": self.task.loss(batch.logits, labels_B)}
        if hparams.loss == "ce-protodist" and self.global_prototypes is not None:
            global_1CD, mask_1C = self.tables["global"]  # one set of prototypes
            has_prototype_B1 = mask_1C[0, labels_B].unsqueeze(1)
            difference_BD = (z_BD - global_1CD[0, labels_B]) * has_prototype_B1
            terms["prototype"] = difference_BD.square().sum() / len(labels_B)
        return terms

    def _contrast(self, z_BD: Tensor, labels_B: Tensor) -> LossTerms:
        """Return the contrasts that ``prototypes`` names; {} before prototypes have come."""
        if self.global_prototypes is None:
            return {}
        hparams = self.hparams
        with_own_class = hparams.denominator == "all"
        terms: LossTerms = {}
        # "global" or "local" -> M sets of prototypes by class, and which of them are there
        for name, (sets_MCD, mask_MC) in self.tables.items():
            if hparams.prototypes in (name, "both"):
                terms[name] = prototype_contrast(
                    z_BD, labels_B, sets_MCD, mask_MC, hparams.temperature, with_own_class
                )
        return terms

    def features(self, data: Samples) -> Tensor:
        return normalize(super().features(data), dim=1)

    def _table(self, sets: Sequence[Prototypes]) -> tuple[Tensor, Tensor]:
        """Return M sets of prototypes as unit vectors [M, C, D], and a mask of those that exist."""
        device = self.client.device
        pairs = [by_class(each.to(device), self.client.num_classes) for each in sets]
        tables, masks = zip(*pairs, strict=True)
        return normalize(torch.stack(tables), dim=2), torch.stack(masks)
