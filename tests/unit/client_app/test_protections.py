"""A client's protections, their order, and DP-SGD.

Of DP-SGD: single gradients by hand, the noise, who is drawn, and refusals.
"""

from importlib import import_module
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from client_app import protections
from client_app.learning.data import Samples
from client_app.learning.evaluation import Evaluation
from client_app.learning.training import train
from client_app.protections import PROTECTIONS, names, protections_of
from client_app.protections.base import Protection
from client_app.protections.uploads import SmallClasses
from protofl_common.config.options import SettingsError
from protofl_common.config.sections import protections as lines_for_people
from protofl_common.experiment.settings import Settings
from protofl_common.models.build import with_group_norm
from protofl_common.models.split import SplitModel
from protofl_common.tasks.metrics import CLASSES_MOVED, METRICS_OF_TESTED, rounded_metrics
from tests.support.harness import client_of, run_config
from tests.support.models import cross_entropy, downhill, dp_step, linear, settings

SIMULATED = {"partition-id": 0, "num-partitions": 3}
SITE = SIMULATED | {"site-name": "north"}
PRIVATE = {"dp": "sample", "dp_epsilon": 8.0, "norm": "group"}
ROUNDED = 3e-4
"""So much shorter are gradients cut, so that none is longer than C once it is rounded."""


@pytest.mark.parametrize(("node", "settings", "wanted"), [
    (SIMULATED, {}, []),
    (SITE, {}, ["one reply to each question"]),
    (SIMULATED, {"min_class_samples": 2}, ["small classes"]),
    (SITE | {"min-class-samples": 2}, {}, ["one reply to each question", "small classes"]),
    (SIMULATED, {"prototype_noise": "gaussian 0.1 0.1"}, ["a paper's noise"]),
    (SIMULATED, PRIVATE, ["differential privacy"]),
    (SIMULATED, PRIVATE | {"secagg": True}, ["differential privacy", "secure aggregation"]),
    (SIMULATED, PRIVATE | {"min_class_samples": 2}, ["small classes", "differential privacy"]),
])  # fmt: skip
def test_protections_follow_from_settings_and_node(node, settings, wanted, tmp_path):
    """Screen and page name each protection that a setting asks for.

    They do not name a paper's noise, which follows from a seed and protects nothing.
    """
    config = run_config(tmp_path, algo="fedproto", **settings)
    client = client_of(config, **node)

    assert [protection.name for protection in protections_of(client).in_order] == wanted

    by_simulation = protections_of(client_of(config, **SIMULATED)).in_order
    told = {line.partition(":")[0] for line in lines_for_people(config)}

    assert told == {protection.name for protection in by_simulation} - {"a paper's noise"}


def test_every_protection_has_its_place_and_says_what_it_is_called_and_when_it_acts(tmp_path):
    """The last two have this order: the first sees all that leaves, and the second hides it."""
    for path in Path(protections.__file__).parent.glob("*.py"):
        import_module(f"client_app.protections.{path.stem}")

    subclasses = Protection.__subclasses__()
    ours = {kind for kind in subclasses if kind.__module__.startswith("client_app.")}

    assert ours == {*PROTECTIONS}
    assert len({kind.name for kind in PROTECTIONS} - {""}) == len(PROTECTIONS)
    assert all(kind.acts is not Protection.acts for kind in PROTECTIONS)

    last_two = [kind.name for kind in PROTECTIONS[-2:]]

    assert last_two == ["differential privacy", "secure aggregation"]

    settings = Settings.from_run_config(run_config(tmp_path, algo="fedproto", secagg=True))

    assert names(settings, is_site=True) == "one reply to each question, secure aggregation"


@pytest.mark.parametrize(("right", "rounded"), [
    (0, 0),
    (14, 10),
    (16, 20),
    (25, 20),
    (42, 40),
    (47, 48),  # of 48 samples
])  # fmt: skip
def test_numbers_of_right_predictions_are_multiples_of_k(right, rounded, tmp_path):
    """Here k is 10. They are never more than the samples.

    Under ``dp`` they are sent as they are, as noise covers each sample already. With fewer than 20
    test samples nothing is sent.
    """
    for privacy_settings, sent in (({}, rounded), (PRIVATE, right)):
        config = run_config(tmp_path, algo="fedproto", min_class_samples=10, **privacy_settings)
        acting = protections_of(client_of(config, **SITE)).in_order
        (small_classes,) = [each for each in acting if isinstance(each, SmallClasses)]

        evaluation = Evaluation({"head": right})

        assert small_classes.evaluation(evaluation, 48).correct == {"head": sent}
        assert small_classes.evaluation(evaluation, 19).correct == {}


def test_metrics_tell_of_no_single_sample_under_min_class_samples():
    """With k = 4 a metric is rounded to a multiple of what 4 samples can change.

    A recall is over its class's samples. Any other metric is taken for a mean over the classes:
    here a sample of the smaller one adds 1 / (2 · 20) to it, twice as much to an AUC.
    """
    labels_N = np.array(40 * [0] + 20 * [1])
    exact = {"recall/0": 0.65, "recall/1": 0.65, "auc": 0.9, "mine": 7.3}
    of_any_other = 4 / (2 * 20)
    steps = {"recall/0": 4 / 40, "recall/1": 4 / 20, "auc": 2 * of_any_other, "mine": of_any_other}

    rounded = rounded_metrics(exact, labels_N, 4)

    for name, value in rounded.items():
        assert abs(value - exact[name]) <= steps[name] / 2 + 1e-9
        assert value / steps[name] == pytest.approx(round(value / steps[name]))
    assert rounded_metrics({"recall/1": 0.99}, labels_N, 14) == {"recall/1": 0.7}
    assert rounded_metrics({"recall/1": 0.99}, labels_N, 13) == {"recall/1": 1.0}
    assert rounded_metrics(exact, labels_N, 1) == exact


def test_one_sample_moves_a_metric_by_less_than_a_step_of_its_rounding():
    """One sample of 50 is predicted as any class, one without samples included."""
    labels_N = np.array(30 * [0] + 20 * [1])
    for seed in range(5):
        scores_NC = np.random.default_rng(seed).normal(size=(50, 3))
        scores_NC[:, 2] = -9  # no sample is predicted as the third class
        scores_NC[:, 0] += 5 * (seed % 2)  # nearly all as the first, or some as the second
        for name, times in (("balanced-accuracy", 1), ("auc", 2), ("macro-f1", 3)):
            before = METRICS_OF_TESTED[name](scores_NC, labels_N)
            for sample, predicted in product((0, 49), range(3)):
                changed_NC = scores_NC.copy()
                changed_NC[sample] = np.eye(3)[predicted] * 100
                after = METRICS_OF_TESTED[name](changed_NC, labels_N)
                # of two classes with samples the smaller one has 20
                assert abs(after - before) <= times / (2 * 20) + 1e-9
                assert CLASSES_MOVED.get(name, 1) == times


def batch(*inputs):
    """Return these inputs, a label of 0 for each, and their rows."""
    labels = torch.zeros(len(inputs), dtype=torch.int64)
    return torch.tensor(inputs), labels, torch.arange(len(inputs))


def test_gradients_are_cut_sample_by_sample():
    """(3, 4) is cut to (0.6, 0.8), (0.3, 0) stays; 10 samples are expected."""
    model = linear()

    dp_step(model, 40, noise=1e-9)(*batch([3.0, 4.0], [0.3, 0.0]))

    wanted = -torch.tensor([[0.9, 0.8]]) / 10

    torch.testing.assert_close(model.body.weight.data, wanted, atol=1e-6, rtol=ROUNDED)


def network_of(kind):
    """Return a network for inputs [N, 3, 5].

    PyTorch can take the gradients of all samples at once, but not those of a GRU ("recurrent").
    """
    body = Recurrent(5, 6)
    if kind == "convolution":
        body = nn.Sequential(nn.Conv1d(3, 4, 2), nn.GroupNorm(2, 4), nn.Flatten(), nn.LazyLinear(6))
    return SplitModel(body, nn.Linear(6, 2))


@pytest.mark.parametrize("at_once", [1, 2**24])
@pytest.mark.parametrize("network", ["convolution", "recurrent"])
def test_the_sum_is_that_of_samples_taken_one_by_one(network, at_once, monkeypatch):
    """It does not matter if PyTorch can take them at once, and how many fit into memory."""
    torch.manual_seed(0)
    model = network_of(network)
    inputs = torch.randn(7, 3, 5)
    labels = torch.arange(7) % 2
    model.head(model.body(inputs))  # a lazy layer gets its shape
    start = [parameter.detach().clone() for parameter in model.parameters()]

    sums = [torch.zeros_like(parameter) for parameter in start]
    for row in range(7):
        logits = model.head(model.body(inputs[row : row + 1]))
        loss = functional.cross_entropy(logits, labels[row : row + 1])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        length = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        for total, gradient in zip(sums, gradients, strict=True):
            total += gradient * min(1.0, 0.5 / length)  # cut to the length 0.5

    monkeypatch.setattr("client_app.protections.private_step.NUMBERS_AT_ONCE", at_once)
    step = dp_step(model, 7, noise=1e-9, loss=cross_entropy, dp_clip=0.5)
    step(inputs, labels, torch.arange(7))

    for before, after, total in zip(start, model.parameters(), sums, strict=True):
        torch.testing.assert_close(before - after, total / 7, atol=1e-6, rtol=ROUNDED)


class Recurrent(nn.GRU):
    def forward(self, inputs):
        outputs_of_steps, _ = super().forward(inputs.transpose(0, 1))
        return outputs_of_steps[-1]


def test_no_sample_shapes_anothers_gradient():
    """In a plain batch it would: the loss is of means over the batch.

    Without the third sample the sum differs by that sample's gradient, of length 0.5 at most.
    """

    def together(batch):
        return {"x": (batch.features.mean() - 1).square() * batch.inputs.mean().exp()}

    sums = []
    for inputs in ([[1.0, 2.0], [2.0, 1.0]], [[1.0, 2.0], [2.0, 1.0], [9.0, 9.0]]):
        model = linear()
        step = dp_step(model, 10, noise=1e-9, loss=together, dp_clip=0.5)
        step(*batch(*inputs))
        sums.append(model.body.weight.data * 10)

    assert float((sums[1] - sums[0]).norm()) <= 0.5 + 1e-5


ODD = [float("nan"), float("inf"), -float("inf"), 1e38, 3e38]


@pytest.mark.parametrize("odd", ODD)
def test_a_gradient_that_is_not_finite_counts_as_zero_and_a_huge_one_is_bounded(odd):
    """The odd sample's numbers are odd, or one of them, or its loss overflows.

    The step of the other sample stays what it was, but for a length of 0.5 at most.
    """

    def squared(batch):
        return {"x": (batch.features + batch.inputs.sum(1, keepdim=True)).square().sum()}

    for loss in (downhill, squared):
        sums = []
        for inputs in ([[3.0, 4.0]], [[3.0, 4.0], [odd, 0.1]], [[3.0, 4.0], [odd, odd]]):
            model = linear()
            step = dp_step(model, 10, noise=1e-9, loss=loss, dp_clip=0.5)
            step(*batch(*inputs))
            sums.append(model.body.weight.data * 10)

        alone = sums[0]

        for with_odd in sums:
            assert bool(with_odd.isfinite().all())
            assert float((with_odd - alone).norm()) <= 0.5 + 1e-5


@pytest.mark.parametrize("odd", ODD)
def test_training_says_nothing_of_a_loss_that_is_not_finite(odd):
    """Whether a loss is finite would tell of a single sample, which differential privacy forbids.

    Without it, training raises an error that says in which epoch the loss diverged.
    """
    model = linear()
    data = Samples(torch.full((20, 2), odd), torch.zeros(20, dtype=torch.int64))

    train(dp_step(model, 20), data, settings(), seed=1)

    assert bool(model.body.weight.isfinite().all())


class Counting(nn.Linear):
    """A layer that changes a buffer whenever it trains, as batch normalisation does."""

    def __init__(self):
        super().__init__(2, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs):
        self.seen += inputs.sum()
        return super().forward(inputs)


def test_a_network_that_changes_buffers_while_it_trains_is_refused():
    private = dp_step(SplitModel(Counting(), nn.Identity()), 10)
    said = r"dp = .sample.: this network changes 0\.body\.seen while it trains"

    with pytest.raises(SettingsError, match=said):
        private(*batch([1.0, 2.0]))


@pytest.mark.parametrize("empty", [False, True])
def test_the_noise_is_sigma_times_c_over_the_expected_batch_even_where_nobody_is_drawn(empty):
    """Each of 20,000 weights has its own noise: σ is 3, C is 0.2, and five samples are expected.

    If nobody is drawn a stand-in sample is passed on, which does not count.
    """
    body = nn.Linear(20_000, 1, bias=False)
    nn.init.zeros_(body.weight)
    model = SplitModel(body, nn.Identity())
    private = dp_step(model, 50, batch_size=5, noise=3.0, dp_clip=0.2)
    private.empty = empty
    inputs = torch.full((1, 20_000), 7.0 if empty else 0.0)

    private(inputs, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))

    assert float(body.weight.std()) == pytest.approx(3.0 * 0.2 / 5, rel=0.03)
    assert float(body.weight.mean().abs()) < 0.01


def test_samples_are_drawn_each_by_itself_and_by_no_seed():
    """No seed says either how a drawn sample is changed, or which of its features are dropped.

    Of 200 samples each is drawn with probability 0.1, in ten batches of each of twenty epochs.
    """
    data = Samples(torch.arange(200.0).view(200, 1), torch.zeros(200, dtype=torch.int64))
    seeds = set()

    def epoch():
        """Return the rows of each batch."""
        private = dp_step(linear(), 200, batch_size=20)
        generator = torch.Generator().manual_seed(1)
        batches = private.batches(data, 20, generator, drop_last=False)
        rows = [index.tolist() for _, _, index in batches]
        seeds.update([generator.initial_seed(), torch.initial_seed()])
        return rows

    epochs = [epoch() for _ in range(20)]

    assert epochs[0] != epochs[1]
    assert len(seeds) == 20

    sizes = []
    for rows in epochs:
        sizes += [len(batch) for batch in rows]

    assert len(sizes) == 200
    assert np.mean(sizes) == pytest.approx(20, abs=1.5)
    assert np.std(sizes) == pytest.approx((200 * 0.1 * 0.9) ** 0.5, rel=0.25)


class Routed(nn.Module):
    """A body that sends each batch to one of two parts, by the batch's first number."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(2, 1) for _ in range(2))

    def forward(self, inputs):
        return self.parts[int(inputs[0, 0] > 0)](inputs)


def test_a_part_of_the_network_that_nobody_drawn_goes_through_has_the_noise_all_the_same():
    """Otherwise it would stay as it was sent, and tell that nobody was drawn who goes through it.

    Weights that do not train stay.
    """
    model = SplitModel(Routed(), nn.Linear(1, 1).requires_grad_(False))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    data = Samples(torch.ones(30, 2), torch.zeros(30, dtype=torch.int64))

    losses = train(dp_step(model, len(data)), data, settings(), seed=1)

    assert set(losses) == {"total-of-features", "total"}
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == name.startswith("head")


def test_batch_normalisation_is_refused_by_the_setting_that_replaces_it():
    """Group normalisation in its place has 16 groups of 48 channels.

    With it a sample's features do not depend on the others.
    """
    body = nn.Sequential(nn.Conv2d(1, 48, 3), nn.BatchNorm2d(48), nn.Flatten())
    model = SplitModel(body, nn.LazyLinear(4))
    model(torch.zeros(2, 1, 8, 8))  # the lazy layer gets its shape

    with pytest.raises(SettingsError, match="norm = 'batch': this network has batch normalisation"):
        dp_step(model, 10)

    dp_step(with_group_norm(model), 10)

    assert [part.num_groups for part in model.modules() if isinstance(part, nn.GroupNorm)] == [16]

    ones = torch.ones(1, 1, 8, 8)
    among_others = torch.cat([ones, torch.randn(2, 1, 8, 8)])

    torch.testing.assert_close(model.body(ones)[0], model.body(among_others)[0])
