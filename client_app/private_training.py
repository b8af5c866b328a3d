"""DP-SGD: a training step whose result says little of any one sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from client_app.data import Samples
from client_app.training import Loss, LossTerms, Step
from protofl_common.config.options import SettingsError
from protofl_common.privacy.plan import Plan
from protofl_common.privacy.release import fresh_draw


class PrivateStep(Step):
    """A step of DP-SGD (Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1).

    Symbols: g_i gradient of the loss of sample i alone, over all modules; C = ``dp-clip``; σ the noise multiplier; q
    the rate at which samples are drawn, each by itself; N training samples.

        ḡ = 1/(q·N) · ( Σ_{i drawn} g_i · min(1, C / ‖g_i‖) + N(0, σ² C² I) )

    A loss is that of a batch of one sample, so no sample shapes another's gradient, whatever the loss. Who was drawn,
    and the noise, come from the system's entropy. An optimizer's momentum and weight decay follow from ḡ.

    Raises
    ------
    SettingsError
        For batch normalisation, in which samples shape each other's features.
    """

    def __init__(self, modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer, loss: Loss, plan: Plan) -> None:
        super().__init__(modules, optimizer, loss)
        parts = [part for module in modules for part in module.modules()]
        if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in parts):
            raise SettingsError("norm = 'batch': this network has batch normalisation, which mixes samples; set group")
        self.plan, self.draw = plan, fresh_draw()
        self.parameters = [one for module in modules for one in module.parameters() if one.requires_grad]
        self.empty = False
        """Whether nobody was drawn: the batch is then a sample that counts nothing, so that noise is added still."""

    def batches(
        self, data: Samples, batch_size: int, generator: torch.Generator, *, no_single: bool, drop_last: bool
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """An epoch's, by Poisson sampling."""
        for _ in range(self.plan.batches):
            drawn = np.flatnonzero(self.draw.random(len(data)) < self.plan.rate)
            self.empty = not len(drawn)
            rows = torch.from_numpy(drawn if len(drawn) else np.zeros(1, np.int64)).to(data.labels.device)
            yield data.inputs[rows], data.labels[rows], rows

    def __call__(self, inputs: Tensor, labels: Tensor, index: Tensor) -> LossTerms:
        """Update the weights; the mean terms of the samples, of which no sum over a batch has been made."""
        sums: dict[nn.Parameter, Tensor] = {}
        found: list[LossTerms] = []
        for batch in zip(inputs.split(1), labels.split(1), index.split(1), strict=True):
            if terms := self.terms(self.model, *batch):
                self.gradients(terms)
                self._add(sums)
                found.append({name: value.detach() for name, value in terms.items()})
        if found:
            self._descend(sums, self.plan.rate * self.plan.samples)
        names = dict.fromkeys(name for one in found for name in one)
        return {
            name: sum((one[name] for one in found if name in one), labels.new_zeros(())) / len(found) for name in names
        }

    def _add(self, sums: dict[nn.Parameter, Tensor]) -> None:
        """Add the sample's gradient, cut to the length C."""
        gradients = {one: one.grad for one in self.parameters if one.grad is not None}
        length = float(torch.stack([grad.norm() for grad in gradients.values()]).norm())
        factor = 0.0 if self.empty else min(1.0, self.plan.privacy.dp_clip / max(length, 1e-30))
        for one, grad in gradients.items():
            sums[one] = sums[one].add_(grad, alpha=factor) if one in sums else grad * factor

    def _descend(self, sums: dict[nn.Parameter, Tensor], expected: float) -> None:
        """A step of the optimizer along ḡ."""
        self.optimizer.zero_grad(set_to_none=True)
        deviation = self.plan.noise * self.plan.privacy.dp_clip
        for one, total in sums.items():
            noise = torch.from_numpy(self.draw.standard_normal(tuple(total.shape), dtype=np.float32)).to(total)
            one.grad = (total + deviation * noise) / expected
        self.optimizer.step()
