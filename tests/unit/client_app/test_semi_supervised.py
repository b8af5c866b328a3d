"""Clients that know few labels: what learns from which samples."""

from pathlib import Path
from typing import Any

import pytest
import torch

from client_app.algorithms.base import ClientAlgorithm, client_half
from client_app.learning.training import Batch, LossTerms
from protofl_common.experiment.catalog import CATALOG
from protofl_common.maths.losses import positive_unlabelled_risk
from protofl_common.maths.prototypes import Prototypes
from protofl_common.wire.payloads import Payload
from tests.support.harness import client_of, run_config

FEW: dict[str, Any] = {"positive_rate": 0.34, "models": "htcnn-1", "feature_dim": 8}
"""digit-domains gives a client 3 samples of each digit: one of them is labelled."""


def algorithm(tmp_path: Path, algo: str = "fedproto", **changes: Any) -> ClientAlgorithm[Any]:
    """Site 1 of 5 in round 2, with global prototypes of classes 0 … 4."""
    site = client_of(run_config(tmp_path, algo=algo, **{**FEW, **changes}), 1, 5)
    found = client_half(CATALOG[algo])(site, 2)
    if "prototypes" in site.settings.row.exchange.down:
        generator = torch.Generator().manual_seed(0)
        found.receive(
            Payload(prototypes=Prototypes(torch.rand(5, 8, generator=generator), torch.arange(5)))
        )
    return found


def batch(client: ClientAlgorithm[Any], rows: slice = slice(None)) -> Batch:
    """Rows of the training samples as the loop gives them: 0 … 9 labelled, 10 … 29 unlabelled."""
    data = client.client.train_set.with_unlabelled()
    inputs = data.inputs[rows]
    index = torch.arange(len(data))[rows]
    features = client.model.body(inputs)
    return Batch(inputs, data.labels[rows], index, features, client.model.head(features))


def batch_loss(client: ClientAlgorithm[Any], of: Batch) -> LossTerms:
    """What the training loop asks for: the client's step has it, and `labelled_loss` makes it."""
    made, found = client.labelled_loss(of), client.step().loss(of)
    assert list(found) == list(made)
    assert all(torch.equal(found[name], value) for name, value in made.items())
    return found


def test_the_training_set_is_what_is_labelled(tmp_path: Path) -> None:
    client = algorithm(tmp_path)
    assert client.client.train_set.labels.sort().values.tolist() == list(range(10))
    assert len(client.client.train_set.unlabelled) == 20
    assert len(client.client.data.train_labels) == client.client.stated_samples == 30
    assert (client.client.test_set.labels >= 0).all()
    assert client.client.test_set.unlabelled is None


@pytest.mark.parametrize("algo", ["local", "fedavg", "fedproto", "fedtgp", "protofed"])
def test_an_algorithms_own_loss_sees_the_labelled_samples_alone(algo: str, tmp_path: Path) -> None:
    client = algorithm(tmp_path, algo)
    some = batch(client, slice(5, 15))
    mixed = batch_loss(client, some)
    alone = client.loss(
        Batch(some.inputs[:5], some.labels[:5], some.index[:5], some.features[:5], some.logits[:5])
    )

    assert list(mixed) == list(alone)
    for name, value in alone.items():
        assert torch.equal(mixed[name], value)

    total: torch.Tensor = sum(mixed.values(), start=torch.zeros(()))
    (slope,) = torch.autograd.grad(total, some.features)

    assert (slope[:5].abs().sum(1) > 0).all()
    assert (slope[5:] == 0).all()


@pytest.mark.parametrize("algo", ["local", "fedavg", "fedproto"])
@pytest.mark.parametrize("risk", ["unbiased", "non-negative"])
def test_the_unlabelled_samples_have_a_term_of_their_own(
    algo: str, risk: str, tmp_path: Path
) -> None:
    plain, client = (
        algorithm(tmp_path, algo),
        algorithm(tmp_path, algo, pu_weight=0.5, pu_risk=risk),
    )
    some = batch(client, slice(5, 15))
    terms, counts = batch_loss(client, some), torch.ones(10, dtype=torch.int64)
    expected = positive_unlabelled_risk(
        some.logits, some.labels, counts, 20, non_negative=risk == "non-negative"
    )

    assert terms.pop("unlabelled").item() == pytest.approx(0.5 * expected.item(), rel=1e-6)
    assert terms == batch_loss(plain, some)

    (slope,) = torch.autograd.grad(expected, some.features)
    assert (slope[5:].abs().sum(1) > 0).all()


def test_a_batch_without_any_label(tmp_path: Path) -> None:
    without, using = algorithm(tmp_path), algorithm(tmp_path, pu_weight=1.0)
    assert batch_loss(without, batch(without, slice(12, 16))) == {}

    terms = batch_loss(using, batch(using, slice(12, 16)))
    assert list(terms) == ["unlabelled"]
    assert terms["unlabelled"].item() > 0


@pytest.mark.parametrize("algo", ["local", "fedproto"])
def test_when_all_is_labelled_the_loss_is_the_algorithms_own(algo: str, tmp_path: Path) -> None:
    """Whatever the weight: to the last bit, and in the same order of samples."""
    client = algorithm(tmp_path, algo, positive_rate=1.0, pu_weight=1.0)
    assert client.client.train_set.with_unlabelled() is client.client.train_set
    assert client.training_set is client.client.train_set
    assert client.step().loss == client.loss

    everything = batch(client)
    own, found = client.loss(everything), batch_loss(client, everything)

    assert list(found) == list(own)
    assert all(torch.equal(found[name], value) for name, value in own.items())


def test_prototypes_and_their_counts_are_those_of_the_labelled_samples(tmp_path: Path) -> None:
    client = algorithm(tmp_path, positive_rate=0.67)
    sent = client.upload().vectors()

    assert sent.counts.tolist() == [2] * 10

    images, labels = client.client.train_set.inputs, client.client.train_set.labels
    with torch.no_grad():
        for label, mean in zip(sent.labels.tolist(), sent.means, strict=True):
            torch.testing.assert_close(mean, client.model.body(images[labels == label]).mean(0))
