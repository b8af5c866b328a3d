"""Clients that know few labels: what learns from which samples."""

import pytest
import torch

from client_app.algorithms.base import client_half
from client_app.learning.training import Batch
from protofl_common.experiment.catalog import CATALOG
from protofl_common.maths.losses import positive_unlabelled_risk
from protofl_common.maths.prototypes import Prototypes
from protofl_common.wire.payloads import Payload
from tests.support.harness import client_of, run_config

FEW = {"positive_rate": 0.34, "models": "htcnn-1", "feature_dim": 8}
"""digit-domains gives a client 3 samples of each digit: one of them is labelled."""


def algorithm(tmp_path, algo="fedproto", **changes):
    """Return the half of site 1 of 5 in round 2, with global prototypes of classes 0 … 4."""
    site = client_of(run_config(tmp_path, algo=algo, **{**FEW, **changes}), 1, 5)
    client = client_half(CATALOG[algo])(site, 2)
    if "prototypes" in site.settings.row.exchange.down:
        means = torch.rand(5, 8, generator=torch.Generator().manual_seed(0))
        client.receive(Payload(prototypes=Prototypes(means, torch.arange(5))))
    return client


def batch(client, rows=slice(None)):
    """Return rows of the training samples as the loop gives them.

    Rows 0 … 9 are labelled and 10 … 29 unlabelled.
    """
    data = client.client.train_set.with_unlabelled()
    inputs = data.inputs[rows]
    index = torch.arange(len(data))[rows]
    features = client.model.body(inputs)
    return Batch(inputs, data.labels[rows], index, features, client.model.head(features))


def batch_loss(client, some):
    """Return the terms of the loss that the training loop asks for.

    They must be those of `labelled_loss`.
    """
    made = client.labelled_loss(some)
    asked_for = client.step().loss(some)
    assert_same_terms(asked_for, made)
    return asked_for


def assert_same_terms(found, wanted):
    """Demand the same names in the same order, and values that are equal to the last bit."""
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert torch.equal(found[name], value)


def test_the_training_set_is_what_is_labelled(tmp_path):
    """30 samples: ten labelled ones to train on, and twenty apart.

    The test set is labelled whole.
    """
    client = algorithm(tmp_path).client

    assert client.train_set.labels.sort().values.tolist() == list(range(10))
    assert len(client.train_set.unlabelled) == 20
    assert len(client.data.train_labels) == 30
    assert client.stated_samples == 30
    assert (client.test_set.labels >= 0).all()
    assert client.test_set.unlabelled is None


@pytest.mark.parametrize("algo", ["local", "fedavg", "fedproto", "fedtgp", "protofed"])
def test_an_algorithms_own_loss_sees_the_labelled_samples_alone(algo, tmp_path):
    """A batch has five labelled and five unlabelled samples; the latter have no gradient."""
    client = algorithm(tmp_path, algo)
    some = batch(client, slice(5, 15))  # five labelled rows, then five unlabelled ones
    labelled = Batch(
        some.inputs[:5], some.labels[:5], some.index[:5], some.features[:5], some.logits[:5]
    )

    terms = batch_loss(client, some)

    assert_same_terms(terms, client.loss(labelled))

    total = sum(terms.values(), start=torch.zeros(()))
    (gradient,) = torch.autograd.grad(total, some.features)

    assert (gradient[:5].abs().sum(1) > 0).all()
    assert (gradient[5:] == 0).all()


@pytest.mark.parametrize("algo", ["local", "fedavg", "fedproto"])
@pytest.mark.parametrize("risk", ["unbiased", "non-negative"])
def test_the_unlabelled_samples_have_a_term_of_their_own(algo, risk, tmp_path):
    """With a pu-weight of 0.5, half of FedPU's risk is added; the other terms are as without it."""
    without = algorithm(tmp_path, algo)
    client = algorithm(tmp_path, algo, pu_weight=0.5, pu_risk=risk)
    some = batch(client, slice(5, 15))

    terms = batch_loss(client, some)

    one_of_each_class = torch.ones(10, dtype=torch.int64)
    expected = positive_unlabelled_risk(
        some.logits,
        some.labels,
        labelled_C=one_of_each_class,
        unlabelled=20,
        non_negative=risk == "non-negative",
    )

    assert terms.pop("unlabelled").item() == pytest.approx(0.5 * expected.item(), rel=1e-6)
    assert terms == batch_loss(without, some)

    (gradient,) = torch.autograd.grad(expected, some.features)

    assert (gradient[5:].abs().sum(1) > 0).all()


def test_a_batch_without_any_label_has_the_loss_of_unlabelled_samples_or_none(tmp_path):
    """Such a batch has a loss only if unlabelled samples have a weight (pu-weight)."""
    unlabelled = slice(12, 16)
    without = algorithm(tmp_path)

    assert batch_loss(without, batch(without, unlabelled)) == {}

    client = algorithm(tmp_path, pu_weight=1.0)
    terms = batch_loss(client, batch(client, unlabelled))

    assert list(terms) == ["unlabelled"]
    assert terms["unlabelled"].item() > 0


@pytest.mark.parametrize("algo", ["local", "fedproto"])
def test_when_all_is_labelled_the_loss_is_the_algorithms_own(algo, tmp_path):
    """Whatever weight unlabelled samples have, it is that to the last bit, in the same order."""
    client = algorithm(tmp_path, algo, positive_rate=1.0, pu_weight=1.0)
    train_set = client.client.train_set

    assert train_set.with_unlabelled() is train_set
    assert client.training_set is train_set
    assert client.step().loss == client.loss

    everything = batch(client)

    assert_same_terms(batch_loss(client, everything), client.loss(everything))


def test_prototypes_and_their_counts_are_those_of_the_labelled_samples(tmp_path):
    """Two of three samples of each class are labelled."""
    client = algorithm(tmp_path, positive_rate=0.67)

    sent = client.upload().vectors()

    assert sent.counts.tolist() == [2] * 10

    train_set = client.client.train_set
    with torch.no_grad():
        for label, mean in zip(sent.labels.tolist(), sent.means, strict=True):
            features = client.model.body(train_set.inputs[train_set.labels == label])
            torch.testing.assert_close(mean, features.mean(0))
