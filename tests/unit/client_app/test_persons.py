"""``dp = "person"``: what a person changes of what leaves, however many samples are theirs.

Each test searches over neighbours: the data of some persons with and without one more, who has any
number of samples of any size and class. Without noise the two may differ by what the noise is for.
The samples of each other person are alike, so that it does not matter which of them are drawn.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from client_app.learning.data import Samples
from client_app.protections import private_step
from client_app.protections.differential_privacy import DifferentialPrivacy
from client_app.protections.private_step import SAMPLES_OF_A_PERSON
from client_app.site.workshop import with_persons_once
from protofl_common.data import ClientData
from protofl_common.data.division import Share
from protofl_common.maths.gaussian import ClassMoments
from protofl_common.privacy import release
from protofl_common.privacy.grid import STEPS
from protofl_common.privacy.persons import Persons, sizes_in_groups
from protofl_common.privacy.released import Released
from tests.support.models import dp_step, linear, privacy

CLASSES = 3
CLIP = 1.0
TRIES = 40


def neighbours():
    """Yield features [N, 2], labels [N] and owners [N] of seven persons, and two slices of these.

    The first slice has the rows of six persons, the second those of all seven. Half of the time the
    samples of the last person all pull in one direction, as strongly as they can.
    """
    for seed in range(TRIES):
        draw = np.random.default_rng(seed)
        sizes = draw.integers(1, 5, size=6)
        features = np.repeat(draw.normal(size=(6, 2)), sizes, axis=0)
        labels = np.repeat(draw.integers(CLASSES, size=6), sizes)
        owners = np.repeat(np.arange(6), sizes)

        number = int(draw.integers(1, 3 * SAMPLES_OF_A_PERSON))  # often more than may count
        more = draw.normal(size=(number, 2)) * 10.0 ** draw.integers(-2, 4)
        more_labels = draw.integers(CLASSES, size=number)
        if seed % 2:
            more[:] = [1e3, 1e3]
            more_labels[:] = 1
        yield (
            torch.from_numpy(np.concatenate([features, more])).float(),
            torch.from_numpy(np.concatenate([labels, more_labels])),
            np.concatenate([owners, np.full(number, 6)]),
            (slice(len(labels)), slice(None)),
        )


@pytest.fixture
def without_noise(monkeypatch):
    """Let no noise be drawn, and no counts be bounded, so that sums can be compared."""

    def nothing(deviation, shape, draw):
        return torch.zeros(shape, dtype=torch.float64)

    monkeypatch.setattr(release, "bounded_counts", lambda noisy_C, samples: noisy_C)
    monkeypatch.setattr(release, "whole_noise", nothing)
    monkeypatch.setattr(private_step, "whole_noise", nothing)


def protection(owners):
    """Return the protection of a client whose ledger was charged for one table.

    ``owners`` says whose each sample is.
    """
    released = Released("fedproto", "person")
    released.allow("table", 1)
    settings = SimpleNamespace(privacy=privacy(dp="person", dp_feature_clip=CLIP))
    work = SimpleNamespace(
        client=SimpleNamespace(settings=settings),
        persons=Persons(owners),
        plan=SimpleNamespace(table_noise=1e-9, part_of_each=1.0),
    )
    return DifferentialPrivacy(work, released)


@pytest.mark.usefixtures("without_noise")
def test_a_person_adds_to_class_sums_and_counts_as_one_sample():
    """The sums behind the means get the noise; with the count, one sample has a length of √2."""
    for features, labels, owners, of_six_and_of_seven in neighbours():
        tables = []  # [C, 3] of six persons, and of seven: a class's sum of features, and its count
        counts = []
        for rows in of_six_and_of_seven:
            made = protection(owners[rows]).class_means(features[rows], labels[rows], CLASSES)
            sums = torch.zeros(CLASSES, 3, dtype=torch.float64)
            sums[made.labels, :2] = made.means.double() * made.counts[:, None]
            sums[made.labels, 2] = made.counts.double()
            tables.append(sums)
            counts.append(protection(owners[rows]).class_counts(labels[rows], CLASSES))

        table_of_six, table_of_seven = tables
        assert float((table_of_seven - table_of_six).norm()) <= 2**0.5 * (1 + 1e-5)

        counts_of_six, counts_of_seven = counts
        assert float((counts_of_seven - counts_of_six).norm()) == 1
        assert float(counts_of_seven.sum()) == 7


@pytest.mark.usefixtures("without_noise")
def test_a_person_adds_to_moments_as_one_sample():
    """One person more moves the sums by a length of 1, which is what the noise is for.

    The length is over counts, sums and second moments of features, each in its own unit (a power of
    the clip length) and weighted by its part of the squared length (`MOMENT_PARTS`).
    """
    for features, labels, owners, of_six_and_of_seven in neighbours():
        sums = []  # of six persons, and of seven
        for rows in of_six_and_of_seven:
            moments = ClassMoments(CLASSES, 2)
            protection(owners[rows]).measure(moments, features[rows], labels[rows])
            persons = len(Persons(owners[rows]))
            # moments are means over persons
            sums.append({name: persons * mean for name, mean in moments.named_buffers()})
        sums_of_six, sums_of_seven = sums
        squared_length = 0.0
        for name, (part, power_of_clip) in release.MOMENT_PARTS.items():
            unit = CLIP**power_of_clip
            moved = (sums_of_seven[name] - sums_of_six[name]) / unit
            squared_length += part * float(moved.square().sum())

        assert squared_length <= 1 + 1e-4


@pytest.mark.slow
@pytest.mark.usefixtures("without_noise")
@pytest.mark.parametrize("at_once", [1, 2**24])
def test_a_person_adds_to_gradients_as_one_sample(at_once, monkeypatch):
    """The mean gradient of a person's samples is cut, and rounded to whole steps.

    With one person more the sum moves by the length C at most. ``at_once``: how many numbers fit
    into memory.
    """
    monkeypatch.setattr(private_step, "NUMBERS_AT_ONCE", at_once)

    def step_of(features, owners):
        """Return the sum of gradients in a step in which every person is drawn."""
        persons = Persons(owners)
        model = linear()
        one = dp_step(model, len(persons), len(persons), persons=persons, dp="person")
        samples = Samples(features, torch.zeros(len(features), dtype=torch.int64))
        start = model.body.weight.detach().clone()
        for batch in one.batches(samples, 10, torch.Generator().manual_seed(0), drop_last=False):
            one(*batch)
        # the step is the sum of the gradients, divided by the persons
        return (start - model.body.weight.detach()).double() * len(persons)

    for features, _, owners, (of_six, _) in neighbours():
        without = step_of(features[of_six], owners[of_six])
        with_one_more = step_of(features, owners)
        assert float((with_one_more - without).norm()) <= CLIP * (1 + 1e-5)


def test_what_leaves_of_persons_is_whole_numbers_of_steps_too():
    """The lowest bits of the mean over a person's samples are not in what is sent, with its noise.

    Numbers are multiples of the grid's step, divided by the eight persons of a batch.
    """
    width = 2000
    persons = Persons(np.repeat(np.arange(8), 3))
    model = linear(width)
    one = dp_step(model, 8, 8, persons=persons, dp="person")
    samples = Samples(torch.randn(24, width), torch.zeros(24, dtype=torch.int64))
    for batch in one.batches(samples, 8, torch.Generator().manual_seed(0), drop_last=False):
        one(*batch)
    step = CLIP / STEPS / 8
    sent = model.body.weight.detach().numpy().ravel().astype(np.float64) / step
    exact = sent[np.abs(sent) < 2**20]  # others are rounded to float32

    assert len(exact) > 20
    np.testing.assert_allclose(exact, np.rint(exact), rtol=0, atol=0.1)


def test_persons_are_drawn_each_by_itself_with_all_or_some_of_their_samples():
    """20 of 100 persons are expected in a batch, each drawn with probability 0.2.

    A person comes with all samples, or with `SAMPLES_OF_A_PERSON` of them if there are more.
    """
    sizes = np.array([1, 40] + [3] * 98)  # samples of each person
    owners = np.repeat(np.arange(100), sizes)
    np.random.default_rng(0).shuffle(owners)
    samples = Samples(torch.from_numpy(owners)[:, None].float(), torch.zeros(len(owners)).long())
    persons_in_batches = []
    for _ in range(40):
        one = dp_step(linear(), 100, 20, persons=Persons(owners), dp="person")

        assert (one.plan.rate, one.plan.batches) == (0.2, 5)

        generator = torch.Generator().manual_seed(1)
        for drawn, _, _ in one.batches(samples, 20, generator, drop_last=False):
            who, counts = np.unique(drawn[:, 0].long().numpy(), return_counts=True)
            persons_in_batches.append(len(who))

            assert one.sizes == counts.tolist()

            wanted = np.minimum(sizes[who], SAMPLES_OF_A_PERSON)

            assert counts.tolist() == wanted.tolist()

    variance = 100 * 0.2 * 0.8  # of a binomial distribution
    assert np.mean(persons_in_batches) == pytest.approx(20, abs=1.5)
    assert np.std(persons_in_batches) == pytest.approx(variance**0.5, rel=0.25)


def test_parts_of_a_batch_do_not_divide_a_person():
    """Persons with these numbers of samples are taken in parts of about four samples."""
    assert [*sizes_in_groups([1, 1, 1, 5, 2, 2], 4)] == [[1, 1, 1], [5], [2, 2]]
    assert [*sizes_in_groups([3], 1)] == [[3]]


def test_each_sample_of_a_person_is_drawn_as_often():
    """Of each of three persons one sample is drawn, 3,000 times."""
    persons = Persons(np.array([7, 2, 7, 7, 2, 5]))
    draw = np.random.default_rng(0)
    times = np.zeros(6)
    for _ in range(3000):
        times[persons.one_of_each(draw)] += 1

    # of person 7 three samples, of 2 two, of 5 one
    np.testing.assert_allclose(times / 3000, [1 / 3, 1 / 2, 1 / 3, 1 / 3, 1 / 2, 1], atol=0.04)


def test_a_person_is_evaluated_once_and_changes_nobody_else():
    """One more person adds one test sample, and so changes the right predictions by one at most.

    Who has test and validation samples counts in the test part alone.
    """

    def rows_of(owners):
        """Return which samples are tested and validated on; ``owners``: whose they are."""
        rows = Share(*(np.arange(len(part)) for part in owners))
        inputs = [part[:, None].astype(np.float32) for part in rows]
        data = ClientData(
            inputs[0], rows[0], inputs[1], rows[1], inputs[2], rows[2],
            ("a", "b"), "", (), (), (), (), 0, owners,
        )  # fmt: skip
        once = with_persons_once(data, owners)
        assert not {*once.persons.test} & {*once.persons.validation}
        np.testing.assert_array_equal(np.asarray(once.test_inputs)[:, 0], once.test_labels)
        return [once.test_labels.tolist(), once.validation_labels.tolist()]

    for seed in range(TRIES):
        draw = np.random.default_rng(seed)
        shares = [draw.integers(8, size=12), draw.integers(8, size=9)]
        without = rows_of(Share(np.zeros(1, int), *shares))
        number = draw.integers(1, 20, size=2)
        more = [np.append(own, [8] * n) for own, n in zip(shares, number, strict=True)]
        with_one_more = rows_of(Share(np.zeros(1, int), *more))
        added = [set(now) ^ set(then) for now, then in zip(with_one_more, without, strict=True)]

        assert [len(one) for one in added] == [1, 0]


def test_a_table_of_other_samples_than_the_training_samples_is_refused():
    with pytest.raises(Exception, match="dp = 'person': fedproto makes use of training data that"):
        protection(np.arange(5)).class_counts(torch.zeros(4, dtype=torch.int64), 2)
