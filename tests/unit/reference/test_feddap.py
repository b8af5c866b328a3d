"""FedDAP, three rounds: fusion within a domain, alignment and contrast, sample by sample."""

import math
from functools import partial

import pytest
import torch

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
Protos = dict[Key, torch.Tensor]


class FedDAPClient(plain.PlainClient):
    def train(self, number: int, weights: plain.State, protos: Protos) -> plain.State:
        self.model.load_state_dict(weights)
        term = partial(self.term, protos)
        self.sgd(number, loss=lambda batch: self.cross_entropy_and(batch, term))
        return plain.copied(self.model)

    def term(self, protos: Protos, z: torch.Tensor, label: int) -> torch.Tensor | float:
        """Return λ1 times the alignment and λ2 times the contrast of a sample with features z.

        It is drawn to the prototype of its class and domain; among those of other domains the ones
        of its class are positive.
        """
        hparams = self.hparams
        domain = self.data.domain

        loss: torch.Tensor | float = 0.0
        if (label, domain) in protos:
            loss = hparams.lambda1 * (1 - plain.cosine(z, protos[label, domain]))

        positive = []
        negative = []
        for (of_class, of_domain), proto in protos.items():
            if of_domain == domain:
                continue
            score = torch.exp(plain.cosine(z, proto) / hparams.temperature)
            if of_class == label:
                positive.append(score)
            else:
                negative.append(score)
        if positive and negative:
            share = sum(positive) / (sum(positive) + sum(negative))
            loss = loss - hparams.lambda2 * torch.log(share)
        return loss


def fused(vectors: list[torch.Tensor], temperature: float) -> torch.Tensor:
    """Return Σ a_i p_i of the vectors p_i, with a_i proportional to exp(Σ_j cos(p_i, p_j) / T)."""
    scores = []
    for a in vectors:
        cosines = [float(plain.cosine(a, b)) for b in vectors]
        scores.append(sum(cosines) / temperature)

    shares = [math.exp(score - max(scores)) for score in scores]  # else T = 0.001 would overflow
    weighted = [share * vector for share, vector in zip(shares, vectors, strict=True)]
    return sum(weighted) / sum(shares)


@pytest.mark.parametrize(("tau", "fusion"), [(0.5, 0.001), (0.2, 0.1)])
def test_three_rounds_equal_an_independent_script(tau, fusion, tmp_path):
    """Two of four clients share a domain, the others have one each.

    The weights, and the prototypes by domain and class, are the script's.
    """
    settings = {
        "clients_per_domain": "2,1,1,0,0",
        "rounds": 3,
        "lr": 0.01,
        "train_samples": 25,
        "feddap__temperature": tau,
        "feddap__fusion_temperature": fusion,
        "feddap__lambda1": 0.7,
        "feddap__lambda2": 0.4,
    }
    outcome, clients = plain.side_by_side(
        tmp_path, FedDAPClient, number=4, algo="feddap", **settings
    )
    domains = {client.data.domain for client in clients}
    assert len(domains) == 3

    weights = plain.copied(clients[0].model)
    protos = {}
    for number in (1, 2, 3):
        states = [client.train(number, weights, protos) for client in clients]
        weights = plain.mean_by_samples(clients, states)

        sent = {}
        for client in clients:
            for label, mean in client.class_means().items():
                sent.setdefault((label, client.data.domain), []).append(mean)
        for key, vectors in sent.items():
            protos[key] = fused(vectors, fusion).float()

    plain.assert_weights_left(outcome, weights)

    state = plain.server_state_left(outcome)
    for domain in domains:
        labels = sorted(label for label, of in protos if of == domain)
        assert state[f"of_domains/{domain}:labels"].tolist() == labels
        wanted = torch.stack([protos[label, domain] for label in labels])
        found = state[f"of_domains/{domain}:means"]
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)

    last_round = outcome.rows[-2]  # the final evaluation has the last row
    assert last_round["server"] == {"domains": 3}


def test_a_domain_whose_only_client_is_left_out_has_no_prototypes(tmp_path):
    """Merging by a median leaves out the client that is least like the others."""
    more = {"clients_per_domain": "2,1,1,0,0", "rounds": 1, "merging": "median"}
    outcome = run_federation(run_config(tmp_path, algo="feddap", **more))
    assert outcome.rows[0]["server"] == {"domains": 2}
