"""The training loop: batches, exact steps, errors, no compiler, inputs that stay on the disk."""

import dataclasses
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.nn import functional

from client_app.learning.training import (
    FusedStep,
    Step,
    TrainingError,
    for_epochs,
    in_round,
    make_optimizer,
    shuffled_batches,
    train,
)
from protofl_common.experiment.settings import Settings, default_run_config
from tests.support.models import cross_entropy, settings, some_data, some_model


def step_of(model, loss, chosen, kind=FusedStep):
    """Return a step of training: a fused one, as most algorithms have it, unless ``kind`` differs.

    ``chosen`` are the settings of training.
    """
    return kind([model], make_optimizer([model], chosen), loss)


def test_a_batch_says_which_samples_of_the_training_set_it_has():
    """``batch.index`` says it in every epoch; what the model makes of them stands beside it."""
    data = some_data()
    model = some_model()
    chosen = settings(local_epochs=3, lr=1e-9)  # so that the model stays what it is
    indices = []

    def watching(batch):
        assert torch.equal(batch.inputs, data.inputs[batch.index])
        assert torch.equal(batch.labels, data.labels[batch.index])
        assert batch.index.dtype == torch.int64
        assert torch.equal(batch.features, model.body(batch.inputs))
        assert torch.equal(batch.logits, model.head(batch.features))
        indices.extend(batch.index.tolist())
        return cross_entropy(batch)

    train(step_of(model, watching, chosen, Step), data, chosen, seed=2)

    assert len(indices) == 3 * len(data)

    epochs = [indices[start : start + len(data)] for start in range(0, len(indices), len(data))]

    for epoch in epochs:
        assert sorted(epoch) == list(range(len(data)))
    assert epochs[0] != epochs[1]


def step_of_two(model, other, loss, chosen):
    """Return a step with one optimizer over two modules, as for a second loop in a round."""
    return Step([model, other], make_optimizer([model, other], chosen), loss)


def test_an_algorithm_may_choose_its_epochs_and_every_module_of_the_step_trains():
    """The algorithm chooses three epochs of two batches, where the settings have one epoch."""
    model = some_model()
    other = torch.nn.Linear(4, 4).eval()
    before = other.weight.detach().clone()
    chosen = for_epochs(settings(local_epochs=1), 3)
    was_training = []

    def through_both(batch):
        was_training.append(other.training)
        return {"cross-entropy": functional.cross_entropy(other(batch.logits), batch.labels)}

    train(step_of_two(model, other, through_both, chosen), some_data(20), chosen, 1)

    assert was_training == [True] * 6
    assert not torch.equal(other.weight, before)


def test_every_module_of_the_step_is_checked():
    """A buffer that becomes NaN is found, though no loss looks at it."""
    model = some_model()
    other = torch.nn.Linear(4, 4)
    other.register_buffer("spoilt", torch.zeros(1))
    chosen = settings(local_epochs=1)

    def spoiling(batch):
        other.spoilt.fill_(torch.nan)
        return cross_entropy(batch)

    with pytest.raises(TrainingError, match="spoilt is no longer finite after training"):
        train(step_of_two(model, other, spoiling, chosen), some_data(), chosen, 1)


@pytest.mark.parametrize(("samples", "no_single", "drop_last", "sizes"), [
    (21, False, False, [10, 10, 1]),
    (21, True, False, [10, 11]),  # so that batch normalisation survives it
    (23, True, True, [10, 10]),
    (21, True, True, [10, 10]),
    (20, True, True, [10, 10]),
    (7, True, True, [7]),  # the only batch
])  # fmt: skip
def test_a_small_last_batch_joins_its_neighbour_or_is_left_out_when_asked(
    samples, no_single, drop_last, sizes
):
    batches = shuffled_batches(
        some_data(samples), 10, torch.Generator(), no_single=no_single, drop_last=drop_last
    )
    assert [len(labels) for _, labels, _ in batches] == sizes


def test_a_network_with_batch_normalisation_trains_on_eleven_samples():
    step = step_of(some_model("resnet10"), cross_entropy, settings())
    losses = train(step, some_data(11), settings(), seed=3)

    assert losses["total"] > 0


def test_losses_are_means_over_the_samples_that_were_seen():
    """Three samples of 23 are left out in each epoch; a term of 1 has a mean of 1 all the same.

    The total is the sum of the terms.
    """
    chosen = settings(drop_last=True, local_epochs=3)
    constant = {"one": torch.tensor(1.0), "two": torch.tensor(2.0)}

    def loss(batch):
        return {"zero": batch.features.sum() * 0, **constant}

    losses = train(step_of(some_model(), loss, chosen), some_data(), chosen, 3)

    assert losses == {
        "zero": 0.0,
        "one": pytest.approx(1),
        "two": pytest.approx(2),
        "total": pytest.approx(3),
    }


def test_a_weight_that_is_not_finite_is_an_error_that_says_what_to_try():
    """The gradient of the last step is NaN, as that of √x at 0, and no loss follows to show it."""
    chosen = settings(batch_size=100, local_epochs=1)

    def finite_with_a_bad_gradient(batch):
        return {"one": (batch.logits - batch.logits.detach()).abs().sqrt().sum()}

    step = step_of(some_model(), finite_with_a_bad_gradient, chosen)
    said = r"is no longer finite after training; try a smaller lr"

    with pytest.raises(TrainingError, match=said):
        train(step, some_data(), chosen, seed=3)


def test_a_loss_that_explodes_is_an_error_that_says_when_and_what_to_try():
    chosen = settings(lr=1e12)
    step = step_of(some_model(), cross_entropy, chosen)

    with pytest.raises(TrainingError, match="local epoch 1; try a smaller lr"):
        train(step, some_data(), chosen, seed=1)


@pytest.mark.parametrize(
    ("kind", "strided"), [(Step, ""), (Step, "gradients"), (Step, "weights"), (FusedStep, "")]
)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_training_equals_a_plain_loop(optimizer, kind, strided):
    """This also holds where gradients and weights are not laid out in memory alike.

    ``strided``: which of the two have their channels last ("" for neither).
    """
    chosen = settings(optimizer=optimizer, momentum=0.9, weight_decay=1e-3, local_epochs=2, lr=0.05)
    data = some_data()
    ours = some_model()
    plain = some_model()

    def layout_of(what):
        return torch.channels_last if what == strided else torch.contiguous_format

    def lay_out_gradients_anew():
        for weight in ours.parameters():
            if weight.grad is not None and weight.ndim == 4:
                weight.grad = weight.grad.contiguous(memory_format=layout_of("gradients"))

    ours.to(memory_format=layout_of("weights"))
    step_of_ours = step_of(ours, cross_entropy, chosen, kind)
    step_of_ours.correction = lay_out_gradients_anew if strided else None
    losses = train(step_of_ours, data, chosen, seed=7)

    step: torch.optim.Optimizer
    if optimizer == "sgd":
        step = torch.optim.SGD(plain.parameters(), lr=0.05, weight_decay=1e-3, momentum=0.9)
    else:
        step = torch.optim.Adam(plain.parameters(), lr=0.05, weight_decay=1e-3)
    generator = torch.Generator().manual_seed(7)
    total = 0.0
    for _ in range(2):
        order = torch.randperm(len(data), generator=generator)
        for batch in order.split(10):
            loss = functional.cross_entropy(plain(data.inputs[batch]), data.labels[batch])
            step.zero_grad()
            loss.backward()
            step.step()
            total += loss.item() * len(batch)

    samples_of_two_epochs = 2 * len(data)
    assert losses["total"] == pytest.approx(total / samples_of_two_epochs, rel=1e-5)
    torch.testing.assert_close(ours.state_dict(), plain.state_dict())


def test_gradients_of_what_the_optimizer_trains_beside_the_modules_begin_anew():
    """Ditto's other model is such a thing, or a layer that another package's method trains.

    The gradient of the term is 1, and each of two steps moves it by 0.5. If gradients were added
    up, the second step would move it by 1.
    """
    model = some_model()
    other = torch.nn.Parameter(torch.ones(()))
    data = some_data()
    optimizer = torch.optim.SGD([*model.parameters(), other], lr=0.5)
    step = Step([model], optimizer, lambda batch: cross_entropy(batch) | {"other": other})

    for left in (0.5, 0.0):
        step(data.inputs, data.labels, torch.arange(len(data)))
        assert other.item() == left


@pytest.mark.parametrize("others", [{}, {"a": torch.zeros(())}])
def test_a_term_that_is_no_single_number_is_named(others):
    """The term is named whether or not the loss has other terms beside it."""

    def loss(batch):
        return others | {"mine": batch.logits.square().mean(0)}

    step = step_of(some_model(), loss, settings())

    with pytest.raises(ValueError, match=r"must be a single number, but mine has shape \[\d+\]"):
        train(step, some_data(), settings(), seed=1)


def test_a_loss_that_is_no_dictionary_is_refused():
    step = step_of(some_model(), lambda batch: batch.logits.square().mean(), settings())
    with pytest.raises(TypeError, match="dictionary of named terms, not Tensor"):
        train(step, some_data(), settings(), seed=1)


def test_the_same_seed_gives_the_same_model_with_dropout_too():
    """The seeds are 4, 4 and 5; dropout draws random numbers while the model trains."""
    trained = []
    for seed in (4, 4, 5):
        model = some_model("mnist-cnn")  # which has dropout
        train(step_of(model, cross_entropy, settings()), some_data(), settings(), seed=seed)
        trained.append(torch.nn.utils.parameters_to_vector(model.parameters()))

    first, same, other = trained

    assert torch.equal(first, same)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("samples", "drop_last", "batches_of_an_epoch"),
    [(23, False, 3), (23, True, 2), (20, False, 2)],
)
@pytest.mark.parametrize("epochs", [1, 2])
def test_as_many_local_steps_as_batches_are_as_many_epochs(
    samples, drop_last, batches_of_an_epoch, epochs
):
    """Losses and weights are the same to the last bit; local-epochs has no effect then."""
    steps = epochs * batches_of_an_epoch
    trained = []
    for changes in ({"local_epochs": epochs}, {"local_epochs": 5, "local_steps": steps}):
        chosen = settings(batch_size=10, drop_last=drop_last, **changes)
        model = some_model()
        losses = train(step_of(model, cross_entropy, chosen), some_data(samples), chosen, seed=2)
        trained.append((losses, model.state_dict()))

    (losses, weights), (losses_of_steps, weights_after_steps) = trained

    assert losses_of_steps == losses
    for name, value in weights.items():
        assert torch.equal(weights_after_steps[name], value)


def sizes_of_batches(chosen):
    """Return the sizes of the batches of a training on 23 samples."""
    sizes = []

    def watching(batch):
        sizes.append(len(batch.labels))
        return cross_entropy(batch)

    train(step_of(some_model(), watching, chosen, Step), some_data(23), chosen, seed=2)
    return sizes


@pytest.mark.parametrize("steps", [1, 4, 7])
def test_local_steps_end_in_the_midst_of_an_epoch_or_after_several(steps):
    chosen = settings(batch_size=10, local_steps=steps)
    assert sizes_of_batches(chosen) == ([10, 10, 3] * 3)[:steps]


def test_epochs_that_an_algorithm_asks_for_itself_are_whole_in_spite_of_local_steps():
    chosen = for_epochs(settings(batch_size=10, local_steps=4), 2)
    assert sizes_of_batches(chosen) == [10, 10, 3] * 2


@pytest.mark.parametrize(("schedule", "wanted"), [
    ({"lr-schedule": "constant"}, [1.0] * 6),
    ({"lr-schedule": "cosine"}, [1.0, 0.93301, 0.75, 0.5, 0.25, 0.06699]),
    ({"lr-schedule": "step", "lr-step": 2, "lr-decay": 0.1}, [1.0, 1.0, 0.1, 0.1, 0.01, 0.01]),
])  # fmt: skip
def test_the_learning_rate_is_a_function_of_the_rounds_number(schedule, wanted):
    """``wanted``: the rate of each of six rounds as a part of the first one's.

    No other setting changes with the round.
    """
    run = Settings.from_run_config(default_run_config() | schedule | {"lr": 0.5, "rounds": 6})

    parts = [in_round(run, number).lr / 0.5 for number in range(1, 7)]

    assert parts == pytest.approx(wanted, abs=1e-5)
    assert in_round(run, 0).lr == 0.5  # before the first round, when a site introduces itself
    assert dataclasses.replace(in_round(run, 5), lr=run.training.lr) == run.training


OF_STORED_INPUTS = """
import re, resource, sys
from pathlib import Path
import torch
from client_app.learning.data import to_device
from client_app.learning.training import Step, make_optimizer, train
from protofl_common.data import clients, open_client_data
from protofl_common.models.split import SplitModel
from protofl_common.experiment.settings import Settings, default_run_config

folder = sys.argv[1]
limit = int(sys.argv[2])
given = {
    "dataset": "arrays",
    "partition": "own",
    "data-dir": folder,
    "cache-dir": folder + "/cache",
    "local-epochs": 1,
    "batch-size": 256,
}
settings = Settings.from_run_config(default_run_config() | given)

def loss(batch):
    return {"ce": torch.nn.functional.cross_entropy(batch.logits, batch.labels)}

def epoch():
    torch.manual_seed(0)
    body = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 4))
    model = SplitModel(body, torch.nn.Linear(4, 2))
    step = Step([model], make_optimizer([model], settings.training), loss)
    data = open_client_data(settings.data, seed=0, partition=0, num_partitions=1)
    samples = to_device(data.train_inputs, data.train_labels, data, torch.device("cpu"))
    losses = train(step, samples, settings.training, seed=1)
    print(type(samples.inputs).__name__, len(samples), losses)

epoch()
used = 1024 * int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
resource.setrlimit(resource.RLIMIT_DATA, (used + limit, used + limit))
try:
    epoch()
except (MemoryError, RuntimeError):
    print("too much")
clients.MOST_BYTES_IN_MEMORY = limit
epoch()
"""


@pytest.mark.slow
def test_an_epoch_over_twice_the_memory_is_the_same_as_with_enough(tmp_path):
    """A process trains without a limit, with too little memory, and with inputs on the disk.

    The limit is half of the images' bytes, the last two times.
    """
    images = np.random.default_rng(0).integers(0, 256, (16000, 3, 32, 32), dtype=np.uint8)
    np.savez(tmp_path / "data.npz", inputs=images, labels=np.arange(len(images)) % 2)
    command = [sys.executable, "-c", OF_STORED_INPUTS, str(tmp_path), str(images.nbytes // 2)]
    done = subprocess.run(command, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr

    ample, without, short = done.stdout.splitlines()

    assert without == "too much"
    assert short == re.sub("^Tensor ", "StoredInputs ", ample)
