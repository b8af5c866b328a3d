"""FML, two rounds: private models of different architectures; the divergences by hand, in float64, of probabilities."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from protofl_common.config.options import SettingsError
from protofl_common.experiment.settings import Settings, default_run_config
from tests.support.harness import run_config, run_federation
from tests.support.plain import CLIENTS, PlainClient, State, assert_close, averaged, copied, model_left

PRIVATE, MEME = ("cnn4", "htcnn-3", "htcnn-1"), "htcnn-1"


class FMLClient(PlainClient):
    def __init__(self, settings: Settings, index: int) -> None:
        super().__init__(settings, index, PRIVATE[index])
        self.model = self.model_of(self.name)
        self.arch = MEME
        self.meme = self.model_of("global")

    def train(self, number: int, weights: State) -> State:
        self.meme.load_state_dict(weights)
        both = torch.nn.ModuleList([self.model, self.meme])
        velocity = [torch.zeros_like(p) for p in both.parameters()]
        for batch in self.batches(number):
            self.step(self.loss(batch), both, velocity)
        return copied(self.meme)

    def loss(self, batch: list[int]) -> torch.Tensor:
        """L_p + L_q, sample by sample."""
        p_BC, q_BC = (torch.softmax(model(self.x[batch]).double(), dim=1) for model in (self.model, self.meme))
        alpha, beta, total = self.hparams.alpha, self.hparams.beta, torch.zeros((), dtype=torch.float64)
        for row, i in enumerate(batch):
            p, q, label = p_BC[row], q_BC[row], self.y[i]
            total = total - alpha * torch.log(p[label]) - beta * torch.log(q[label])
            total = total + (1 - alpha) * self.divergence(q, p) + (1 - beta) * self.divergence(p, q)
        return total / len(batch)

    def divergence(self, target: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """KL(target ‖ found) = Σ_c target_c log(target_c / found_c)."""
        if self.hparams.mutual == "detached":
            target = target.detach()
        total = sum(target[c] * torch.log(target[c] / found[c]) for c in range(len(target)))
        return total if self.hparams.mutual == "detached" else total / len(target)


@pytest.mark.parametrize(("alpha", "beta", "mutual"), [(0.5, 0.5, "detached"), (0.3, 0.8, "coupled")])
def test_two_rounds_equal_an_independent_script(alpha: float, beta: float, mutual: str, tmp_path: Path) -> None:
    hparams: dict[str, Any] = {"fml__alpha": alpha, "fml__beta": beta, "fml__mutual": mutual, "fml__meme": MEME}
    config = run_config(
        tmp_path, liars=0, algo="fml", feature_dim=16, lr=0.02, test_samples=20, train_samples=25, **hparams
    )
    nodes = {
        50 + i: {"partition-id": i, "num-partitions": CLIENTS, "arch": arch, "state-dir": f"{tmp_path}/site"}
        for i, arch in enumerate(PRIVATE)
    }
    outcome = run_federation(config, nodes=nodes)

    clients = [FMLClient(Settings.from_run_config(config), index) for index in range(CLIENTS)]
    weights = copied(clients[0].meme)
    for number in (1, 2):
        weights = averaged([client.train(number, weights) for client in clients], [len(one.y) for one in clients])
    assert_close(load_file(outcome.folder / "weights.safetensors"), weights)
    for client in clients:
        assert_close(model_left(tmp_path, client.name), copied(client.model))
    assert len({card["arch"] for card in outcome.summary["clients"].values()}) == len(PRIVATE)


def test_an_unknown_meme_is_one_line_with_the_choices() -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_run_config(default_run_config() | {"algo": "fml", "fml.meme": "cnn5"})
    (line,) = str(caught.value).splitlines()
    assert line.startswith("fml.meme = 'cnn5': choose one of '', ")
    assert "did you mean cnn4?" in line


def test_a_batch_with_one_label_does_not_stop_a_meme_with_batch_normalisation(tmp_path: Path) -> None:
    few = {"positive_rate": 0.1, "pu_weight": 1.0, "train_samples": 24, "test_samples": 20}
    outcome = run_federation(run_config(tmp_path, liars=0, algo="fml", backbones="glyphs", **few), CLIENTS)
    assert all(row["valid"] == CLIENTS for row in outcome.rows)
