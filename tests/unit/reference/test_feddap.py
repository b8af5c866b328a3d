"""FedDAP, three rounds: fusion within a domain, alignment and contrast, sample by sample."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support import plain
from tests.support.declaration import PLAIN, Declared
from tests.support.harness import run_config, run_federation

DECLARED = Declared(
    PLAIN,
    weights=True,
    losses=("cross-entropy", "alignment", "contrast"),
    acts={"lambda1": 9.0, "lambda2": 0.0, "temperature": 0.5},
)

Key = tuple[int, str]
"""Class and domain."""


def cosine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a * b).sum() / (a.norm().clamp(min=1e-12) * b.norm().clamp(min=1e-12))


class FedDAPClient(plain.PlainClient):
    def train(
        self, number: int, weights: plain.State, protos: dict[Key, torch.Tensor]
    ) -> plain.State:
        self.model = self.model_of("global")
        self.model.load_state_dict(weights)
        self.sgd(number, loss=lambda batch: self.cross_entropy_and(batch, self.term(protos)))
        return plain.copied(self.model)

    def term(
        self, protos: dict[Key, torch.Tensor]
    ) -> Callable[[torch.Tensor, int], torch.Tensor | float]:
        """λ1 times the alignment and λ2 times the contrast, of a sample."""
        hparams = self.hparams
        domain = self.data.domain

        def of_sample(z: torch.Tensor, label: int) -> torch.Tensor | float:
            loss: torch.Tensor | float = 0.0
            if (label, domain) in protos:
                loss = loss + hparams.lambda1 * (1 - cosine(z, protos[label, domain]))
            positive: torch.Tensor | float = 0.0
            negative: torch.Tensor | float = 0.0
            for (of_class, of_domain), proto in protos.items():
                if of_domain == domain:
                    continue
                score = torch.exp(cosine(z, proto) / hparams.temperature)
                if of_class == label:
                    positive = positive + score
                else:
                    negative = negative + score
            if isinstance(positive, torch.Tensor) and isinstance(negative, torch.Tensor):
                loss = loss - hparams.lambda2 * torch.log(positive / (positive + negative))
            return loss

        return of_sample


def fused(vectors: list[np.ndarray], temperature: float) -> np.ndarray:
    """Σ a_i p_i, a_i proportional to exp(Σ_j cos(p_i, p_j) / T)."""
    scores = []
    for a in vectors:
        cosines = [float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)) for b in vectors]
        scores.append(sum(cosines) / temperature)
    shares = [math.exp(score - max(scores)) for score in scores]
    return sum(share * vector for share, vector in zip(shares, vectors, strict=True)) / sum(shares)


@pytest.mark.parametrize(("tau", "fusion"), [(0.5, 0.001), (0.2, 0.1)])
def test_three_rounds_equal_an_independent_script(
    tau: float, fusion: float, tmp_path: Path
) -> None:
    """Two clients share a domain, two have one each."""
    more = {"clients_per_domain": "2,1,1,0,0", "rounds": 3, "feature_dim": 16, "lr": 0.01}
    more |= {"feddap__temperature": tau, "feddap__fusion_temperature": fusion}
    more |= {"feddap__lambda1": 0.7, "feddap__lambda2": 0.4, "train_samples": 25}
    outcome, clients = plain.side_by_side(tmp_path, FedDAPClient, number=4, algo="feddap", **more)

    assert len({client.data.domain for client in clients}) == 3

    weights = plain.copied(clients[0].model_of("global"))
    sizes = [len(client.y) for client in clients]
    protos: dict[Key, torch.Tensor] = {}
    for number in (1, 2, 3):
        weights = plain.averaged(
            [client.train(number, weights, protos) for client in clients], sizes
        )
        sent: dict[Key, list[np.ndarray]] = {}
        for client in clients:
            for label, mean in client.class_means().items():
                sent.setdefault((label, client.data.domain), []).append(mean.numpy())
        for key, vectors in sent.items():
            protos[key] = torch.from_numpy(fused(vectors, fusion)).float()

    plain.assert_close(plain.weights_left(outcome), weights)

    state = load_file(max((outcome.folder / "checkpoints").glob("*.safetensors")))
    for domain in {domain for _, domain in protos}:
        labels = sorted(label for label, of in protos if of == domain)
        assert state[f"of_domains/{domain}:labels"].tolist() == labels
        wanted = torch.stack([protos[label, domain] for label in labels])
        torch.testing.assert_close(
            state[f"of_domains/{domain}:means"], wanted, rtol=1e-3, atol=1e-4
        )

    assert outcome.rows[-2]["server"] == {"domains": 3}


def test_a_domain_that_merging_has_left_nothing_of_has_no_prototypes(tmp_path: Path) -> None:
    """A median leaves out the client least like the others, here the only one of its domain."""
    more = {"clients_per_domain": "2,1,1,0,0", "rounds": 1, "merging": "median"}
    outcome = run_federation(run_config(tmp_path, algo="feddap", **more))
    assert outcome.rows[0]["server"] == {"domains": 2}
