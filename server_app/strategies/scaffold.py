"""SCAFFOLD (Karimireddy et al., ICML 2020), server half: the mean of the models, and of the changes of the variates.

Other half: `client_app/algorithms/scaffold.py`.
Symbols: x the global model; c the server's control variate; S the round's clients of N; η_g = ``server-lr``.

Model (Eq. 5)       x ← x + (η_g / |S|) Σ_{i ∈ S} (y_i − x)
Variate (Eq. 5)     c ← c + (1/N) Σ_{i ∈ S} Δc_i

Every client weighs alike, as in the paper; ``merging`` may put a median or trimmed mean in place of both means.
Buffers (batch-normalisation statistics) are averaged and have no variate.
"""

from __future__ import annotations

from dataclasses import replace

from protofl_common.experiment.catalog import SCAFFOLDHparams
from protofl_common.maths.aggregation import merge_weights
from protofl_common.models.split import control_variate
from protofl_common.wire.limits import Template
from protofl_common.wire.payloads import Payload, template_of
from server_app.network.membership import Federation
from server_app.strategies.fedavg import FedAvg
from server_app.validation.replies import Upload


class SCAFFOLD(FedAvg[SCAFFOLDHparams]):
    """Keeps the global model and c."""

    state: tuple[str, ...] = ("weights", "control")

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation)
        self.control = dict(control_variate(self.first_model()).state_dict())

    def payload_down(self) -> Payload:
        """Send x and c."""
        return Payload(weights=self.weights, control=self.control)

    def templates(self) -> dict[str, Template]:
        """Return the arrays of y_i and of Δc_i."""
        return super().templates() | {"control": template_of(self.control)}

    def merge(self, uploads: list[Upload]) -> dict[str, float]:
        """Eq. 5."""
        mean = self.averaged([replace(upload, most=1) for upload in uploads])
        for name, before in self.weights.items():
            if before.is_floating_point():
                mean[name] = before + self.hparams.server_lr * (mean[name] - before)
        changes = [upload.payload.weights("control") or {} for upload in uploads]
        change = merge_weights(changes, [1 / len(changes)] * len(changes), *self.federation.bounds.weights)
        part = len(changes) / len(self.federation.cards)
        self.weights = mean
        self.control = {name: value + part * change[name] for name, value in self.control.items()}
        return {}
