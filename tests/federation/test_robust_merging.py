"""Median and trimmed mean: by hand, against NumPy and SciPy, and where an attack takes the mean."""

import itertools

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, MessageType
from safetensors.torch import load_file
from scipy.stats import trim_mean

from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.settings import to_run_config
from protofl_common.maths.aggregation import MEAN, MEDIAN, Aggregator, clip_updates
from protofl_common.maths.prototypes import Prototypes
from protofl_common.wire.records import SiteCard
from server_app.network.membership import FederationError
from server_app.run.bounds import Bounds, bounds_of
from tests.support.attacks import (
    both,
    by,
    flipped,
    flooding,
    raw,
    reversed_update,
    scaled,
    values_of,
)
from tests.support.harness import federate, refusal, run_config, run_federation, settings_of
from tests.support.sites import real_sites
from tests.support.ten_clients import honest_accuracy, run_of_ten

TRIMMED = Aggregator("trimmed-mean", 1)
A_FIFTH = Aggregator("trimmed-mean", 0.2)
A_LITTLE = 1e-9
"""SciPy rounds the number to drop down, so the share that it is given is a little larger."""


def random_prototypes(rng, clients):
    """Return random prototypes of clients, each of some of five classes, in eight dimensions."""
    found = []
    for _ in range(clients):
        labels = torch.from_numpy(np.sort(rng.choice(5, rng.integers(1, 6), replace=False)))
        means = torch.from_numpy(rng.normal(size=(len(labels), 8)).astype(np.float32))
        found.append(Prototypes(means, labels, torch.from_numpy(rng.integers(1, 90, len(labels)))))
    return found


def cards(number, real=True, archs=("cnn4",)):
    """Return introductions of sites with operators, or of simulated clients if not ``real``.

    They have the architectures in turn, and are alike in all else.
    """
    found = []
    for n in range(number):
        card = SiteCard(
            name=f"site-{n}",
            partition=n,
            num_partitions=number,
            domain="",
            arch=archs[n % len(archs)],
            input_shape=(1, 8, 8),
            parameters=9,
            train_samples=30,
            test_samples=20,
            classes=("zero", "one"),
            present=(0, 1),
            weights="",
            device="cpu",
            real=real,
        )
        found.append(card)
    return found


def test_how_many_are_dropped():
    """At each end ⌈β n⌉ of n clients are dropped, β the trim-fraction; one is always left.

    Of three one is dropped, of two never. A trim-fraction of 1 and more is a number of liars.
    """

    def dropped_of(clients, aggregator):
        """Return how many are dropped at each end, for each number of clients."""
        return [aggregator.dropped_at_each_end(n) for n in clients]

    assert dropped_of([1, 2, 3, 5, 6, 10, 11], A_FIFTH) == [0, 0, 1, 1, 2, 2, 3]
    assert dropped_of([1, 2, 3, 4, 5, 10], MEDIAN) == [0, 0, 1, 1, 2, 4]
    assert dropped_of([10], Aggregator("trimmed-mean", 0.0)) == [0]
    assert dropped_of([100], Aggregator("trimmed-mean", 0.07)) == [7]  # not 7.000000000000001
    assert dropped_of([2, 3, 4, 5, 100], Aggregator("trimmed-mean", 2)) == [0, 1, 1, 2, 2]


@pytest.mark.parametrize("seed", range(5))
def test_merged_prototypes_against_numpy_and_scipy(seed):
    """Median and trimmed mean of each class over those of ten clients that hold it."""
    sets = random_prototypes(np.random.default_rng(seed), clients=10)

    median = MEDIAN.merge_prototypes(sets, "counts", None)
    trimmed = A_FIFTH.merge_prototypes(sets, "counts", None)

    assert median.labels.tolist() == trimmed.labels.tolist() == [0, 1, 2, 3, 4]

    for label in range(5):
        sent = [one.means[one.labels == label][0] for one in sets if label in one.labels]
        rows = torch.stack(sent).double().numpy()
        share_dropped = A_FIFTH.dropped_at_each_end(len(rows)) / len(rows)
        middle = median.means[label].numpy()
        np.testing.assert_allclose(middle, np.median(rows, axis=0), rtol=1e-6)
        mean = trimmed.means[label].numpy()
        np.testing.assert_allclose(mean, trim_mean(rows, share_dropped + A_LITTLE), rtol=1e-6)


def test_no_order_of_clients_matters_and_a_class_nobody_sent_is_kept():
    """Nobody sends class 4, so that it keeps its prototype of the round before."""
    sets = []
    for drawn in random_prototypes(np.random.default_rng(3), 4):
        is_sent = drawn.labels < 4
        sets.append(Prototypes(drawn.means[is_sent], drawn.labels[is_sent]))
    previous = Prototypes(torch.full((1, 8), 7.0), torch.tensor([4]))

    wanted = MEDIAN.merge_prototypes(sets, "uniform", previous)

    *_, kept = wanted.means.tolist()
    assert kept == [7.0] * 8

    for order in itertools.permutations(sets):
        found = MEDIAN.merge_prototypes(list(order), "uniform", previous)
        assert torch.equal(found.means, wanted.means)


def test_one_vote_per_client_by_hand():
    """Of class 4 the client that is far away loses all three prototypes, even one that is near.

    Only two clients hold class 7, and one class 8: too few to leave anything out.
    """
    labels = torch.tensor([4, 7])
    one = Prototypes(torch.tensor([[1.0, 0.0], [9.0, 9.0]]), labels)
    two = Prototypes(torch.tensor([[2.0, 0.0], [9.0, 9.0]]), labels)
    far_means = torch.tensor([[50.0, 0.0], [1.5, 0.0], [52.0, 0.0], [5.0, 5.0]])
    far = Prototypes(far_means, torch.tensor([4, 4, 4, 8]))

    for aggregator in (MEDIAN, A_FIFTH):
        found = aggregator.without_outliers([one, two, far])
        assert [left.labels.tolist() for left in found] == [[4, 7], [4, 7], [8]]
        assert found[0].means.tolist() == one.means.tolist()
        assert found[1].means.tolist() == two.means.tolist()

    assert MEAN.without_outliers([one, two, far]) == [one, two, far]


def left_of(sets, aggregator):
    """Return how many prototypes of each client the aggregator does not leave out."""
    return [len(left) for left in aggregator.without_outliers(sets)]


def test_who_is_the_farthest_depends_on_all_classes_of_a_client():
    """Five clients with a number x of class 0 and y of class 1; the fifth, (1.5, 1.5), is out."""
    values = [[0.0, 0.0], [1.0, 0.0], [2.0, 0.0], [0.0, 1.0], [1.5, 1.5]]
    sets = [Prototypes(torch.tensor([[x], [y]]), torch.tensor([0, 1])) for x, y in values]

    # by class 0 alone the third, x = 2, would be the farthest
    # of each client two prototypes are left, of the fifth none
    assert left_of(sets, A_FIFTH) == [2, 2, 2, 2, 0]


def test_who_has_more_classes_is_no_farther_for_it():
    """Four are a little off in four classes each; the fifth lies in the one class that it has."""
    sets = []
    for offset in (0.0, 0.1, 0.2, -0.1):
        sets.append(Prototypes(torch.full((4, 1), offset), torch.arange(4)))
    sets.append(Prototypes(torch.tensor([[1.0]]), torch.tensor([0])))

    *_of_the_four, of_fifth = left_of(sets, A_FIFTH)
    assert of_fifth == 0


def test_a_median_leaves_more_out_than_a_trimmed_mean():
    """Of five clients the median leaves the two farthest out, the trimmed mean one."""
    values = [0.0, 1.0, 2.0, 3.0, 9.0]
    sets = [Prototypes(torch.tensor([[value]]), torch.tensor([0])) for value in values]

    assert left_of(sets, MEDIAN) == [0, 1, 1, 1, 0]
    assert left_of(sets, A_FIFTH) == [1, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("key", "value", "other"), [("merging", "median", "mean"), ("max-update-ratio", 2.0, 0.0)]
)
@pytest.mark.parametrize("algo", CATALOG)
def test_robust_merging_is_refused_by_name_where_a_server_merges_nothing_by_it(
    algo, key, value, other
):
    row = CATALOG[algo]
    config = {"algo": algo, key: value}
    if "merging" in row.supports:
        assert to_run_config(settings_of(config))[key] == value
        return

    why = f"in {algo} clients send nothing that a server could merge"
    if row.exchange.up:
        why = f"the row of {algo} does not declare that its server merges by it"

    assert refusal(config) == f"{key} = {value!r}: {why}; choose {other}"


AVERAGING = {
    algo
    for algo, row in CATALOG.items()
    if row.averages_prototypes and "prototypes" in row.exchange.up
}
MEDIANS = [(algo, "prototypes") for algo in sorted(AVERAGING - {"fednh"})]
"""FedNH's prototypes only move towards the mean; its reference test has the median."""


@pytest.mark.parametrize(
    ("algo", "sent"),
    [*MEDIANS, ("fedavg", "weights"), ("fedplvm", "weights"), ("fesem", "weights")],
)
def test_a_server_takes_the_median_of_what_was_sent(algo, sent, tmp_path):
    """The global prototypes or weights are the median of three clients', number by number."""
    data = {"dataset": "digits", "partition": "iid", "models": "htcnn-1", "fesem__centres": 1}
    outcome = federate(tmp_path, clients=3, algo=algo, merging="median", rounds=1, **data)

    replies = [reply.content[sent] for _, reply in outcome.exchanged()]
    found = load_file(outcome.folder / f"{sent}.safetensors")
    for name in found if sent == "weights" else ["means"]:
        # FeSEM's weights are those of its group 0
        arrays = [values_of(reply[name.removeprefix("0/")]) for reply in replies]
        np.testing.assert_array_equal(found[name].numpy(), np.median(np.stack(arrays), axis=0))


RECEIVED = {"fedplvm": "local-prototypes", "mpft": "centres"}
"""The server's figure that says how many vectors it goes on with."""


@pytest.mark.parametrize("algo", ["fedplvm", "mpft"])
def test_what_is_clustered_or_trained_on_is_without_the_farthest(algo, tmp_path):
    """A server that clusters or trains on the clients' vectors is protected from two liars.

    One of five sends its vectors at twenty times their length: nothing of them is left. Another
    sends as many vectors as it has samples, 60: fewer are left. For MPFT these are as many as a
    tenth of its samples and one a class, for FedPLVM twice the most that another has of each class.
    """
    data = {
        "dataset": "digits",
        "partition": "iid",
        "arch": "htcnn-1",
        "rounds": 1,
        "train_samples": 60,
    }
    received = {}
    for merging in ("mean", "trimmed-mean"):
        config = run_config(tmp_path / merging, algo=algo, merging=merging, **data)
        outcome = run_federation(config, clients=5, tamper=by({1004: scaled(20)}))
        received[merging] = outcome.rows[0]["server"][RECEIVED[algo]]

    assert received["trimmed-mean"] < received["mean"]

    config = run_config(tmp_path / "many", algo=algo, liars=1, **data)
    outcome = run_federation(config, clients=5, tamper=by({1004: flooding(60)}))
    sent = [values_of(reply.content["prototypes"]["labels"]) for _, reply in outcome.exchanged()]
    *honest, flood = [np.bincount(labels, minlength=10) for labels in sent]
    most = {"mpft": 0.1 * 60 + 10, "fedplvm": 2 * np.max(honest, axis=0).sum()}[algo]
    left_of_flood = outcome.rows[0]["server"][RECEIVED[algo]] - np.sum(honest)

    assert left_of_flood == most < flood.sum()
    assert "site-4: " in str(outcome.summary["bounded"])


@pytest.mark.parametrize("at_once", [5, 2**18])
def test_merged_weights_against_numpy_and_scipy(at_once, monkeypatch):
    """Nine clients with weights and a whole number, which is rounded after it is merged.

    A layer of more numbers than ``at_once`` is sorted in several parts.
    """
    monkeypatch.setattr("protofl_common.maths.aggregation.COORDINATES_AT_ONCE", at_once)
    rng = np.random.default_rng(0)
    drawn = [
        (rng.normal(size=(3, 4)).astype(np.float32), int(rng.integers(1, 90))) for _ in range(9)
    ]
    sets = [{"w": torch.from_numpy(weights), "seen": torch.tensor(seen)} for weights, seen in drawn]
    stacked = np.stack([one["w"].numpy().astype(np.float64) for one in sets])
    counts = np.array([int(one["seen"]) for one in sets])
    shares = np.arange(1, 10) / 45  # 1 to 9, which sum to 45
    dropped = 2 / 9 + A_LITTLE  # ⌈0.2 · 9⌉ = 2 of nine at each end
    wanted = {
        "mean": (np.tensordot(shares, stacked, 1), shares @ counts),
        "median": (np.median(stacked, axis=0), np.median(counts)),
        "trimmed-mean": (trim_mean(stacked, dropped), trim_mean(counts, dropped)),
    }
    for merging, (weights, seen) in wanted.items():
        found = Aggregator(merging, 0.2).merge_weights(sets, shares.tolist())
        np.testing.assert_allclose(found["w"].numpy(), weights, rtol=1e-6, atol=1e-7)
        assert (int(found["seen"]), found["seen"].dtype) == (round(float(seen)), torch.int64)


def test_an_update_is_cut_to_a_multiple_of_the_median_length():
    """Lengths of 1, 2 and 300,000: the median is 2, and the longest is cut to 3."""
    start = {"w": torch.tensor([1.0, 1.0]), "seen": torch.tensor(4)}
    short = {"w": torch.tensor([2.0, 1.0]), "seen": torch.tensor(9)}
    middle = {"w": torch.tensor([1.0, 3.0]), "seen": torch.tensor(9)}
    long = {"w": torch.tensor([1.0, 1 - 3e5]), "seen": torch.tensor(9)}

    *others, clipped = clip_updates([short, middle, long], [start] * 3, 1.5)  # times the median
    assert others == [short, middle]
    assert clipped["w"].tolist() == [1.0, -2.0]
    assert int(clipped["seen"]) == 9

    # two are too few: their median could be the hostile client's
    assert clip_updates([middle, long], [start] * 2, 1.5) == [middle, long]
    # where the median is 0, lengths above 0 are compared, and one is too few
    *_unchanged, found_short = clip_updates([start, start, short], [start] * 3, 1.5)
    assert found_short is short

    # lengths of 0, 0, 1, 2 and 2: the median is 1, and those of 2 are cut
    *_others, one, other = clip_updates([start, start, short, middle, middle], [start] * 5, 1.5)
    assert one is not middle
    assert other is not middle


def test_scaffolds_control_variates_are_cut_as_its_weights_are(tmp_path):
    """Site-4 sends −4 times its control variate, which begins at 0: it is cut to 2 medians."""
    sent = []

    def lie(message, reply):
        """Note what each client sends as its control variate; site-4 lies."""
        if message.metadata.message_type != MessageType.TRAIN:
            return reply
        factor = 1
        if message.metadata.dst_node_id == 1004:
            factor = -4
        control = reply.content["control"]
        values = {name: factor * values_of(array) for name, array in control.items()}
        sent.append({name: torch.from_numpy(array) for name, array in values.items()})
        arrays = {name: raw(array.astype("<f4")) for name, array in values.items()}
        reply.content["control"] = ArrayRecord(arrays)
        return reply

    data = {"dataset": "digits", "partition": "iid", "models": "htcnn-1", "rounds": 1, "liars": 1}
    outcome = federate(tmp_path, clients=5, tamper=lie, algo="scaffold", **data)

    first, *_ = sent
    zeros = {name: torch.zeros_like(value) for name, value in first.items()}
    wanted = MEAN.merge_weights(clip_updates(sent, [zeros] * 5, 2.0), [1 / 5] * 5)
    state = load_file(max((outcome.folder / "checkpoints").glob("*.safetensors")))

    for name, value in wanted.items():
        torch.testing.assert_close(state[f"control/{name}"], value)
    assert "site-4: its change of the weights is cut to 2 times" in str(outcome.summary["bounded"])


def test_too_few_clients_are_told(tmp_path, capsys):
    """Two clients cannot outvote each other, and two liars need five clients.

    A class that only two hold is not protected, of which the run warns.
    """
    config = run_config(tmp_path, merging="median", rounds=1, participation=0.5)
    two = r"'median': a round asks only 2 sites \(participation = 0\.5\)"

    with pytest.raises(FederationError, match=two):
        run_federation(config, clients=4)

    four = "liars = 2: a round asks only 4 sites, and 5 are the fewest that can"
    with pytest.raises(FederationError, match=four):
        federate(tmp_path, clients=4, liars=2, rounds=1)

    shares = {"dataset": "digits", "partition": "pathological", "classes-per-client": 4}
    run_federation(config | shares | {"participation": 1.0}, clients=5)
    warning = "fewer than 3 clients hold 10 classes, where merging = 'median' outvotes nobody"

    assert warning in capsys.readouterr().out


def test_one_hostile_model_of_ten_takes_the_mean_and_nothing_else(tmp_path):
    """The hostile site reverses its update and makes it ten times as long, below every limit.

    The mean loses 30 points of accuracy and more, the robust ways of merging 5 at most.
    """
    settings = {
        "algo": "fedavg",
        "arch": "htcnn-1",
        "rounds": 3,
        "lr": 0.1,
        "batch_size": 10,
        "hostile": (1009,),
    }

    def accuracy(name, change, **merging):
        options = {"merging": "mean"} | merging | settings
        outcome = run_of_ten(tmp_path / name, change=change, **options)
        return honest_accuracy(outcome, "head")

    calm = accuracy("calm", None)
    assert calm > 60
    assert accuracy("mean", reversed_update(10)) < calm - 30
    for robust in ({"merging": "median"}, {"merging": "trimmed-mean"}, {"max_update_ratio": 1.0}):
        assert accuracy(str(robust), reversed_update(10), **robust) > calm - 5, robust


SHARED = {
    "arch": "htcnn-3",
    "initial_weights": "shared",
    "train_samples": 60,
    "batch_size": 10,
    "rounds": 3,
}


@pytest.fixture(scope="module")
def unattacked(tmp_path_factory):
    """Return the accuracy that the mean reaches without an attack, in percent."""
    return honest_accuracy(run_of_ten(tmp_path_factory.mktemp("calm"), "mean", None, **SHARED))


ATTACKS = {"×10": scaled(10), "×-5": scaled(-5), "flipped ×5": both(flipped(10), scaled(5))}


@pytest.mark.parametrize("attack", ATTACKS)
def test_robust_merging_holds_where_the_mean_does_not(attack, unattacked, tmp_path):
    """Against prototypes: the mean loses 30 points of accuracy and more, the others 5 at most."""

    def accuracy(merging):
        outcome = run_of_ten(tmp_path / merging, merging, ATTACKS[attack], **SHARED)
        return honest_accuracy(outcome)

    assert unattacked > 60
    assert accuracy("mean") < unattacked - 30
    assert accuracy("median") > unattacked - 5
    assert accuracy("trimmed-mean") > unattacked - 5


def bounds(sites, **settings):
    """Return the bounds of a run with these settings on what such sites send."""
    config = {key.replace("_", "-"): value for key, value in settings.items()}
    return bounds_of(settings_of(config), sites)


def test_sites_with_operators_are_bounded_by_default_and_simulated_clients_are_not():
    """Nor are sites bounded where a round asks fewer than three, or sums hide single uploads."""
    averaging = bounds(cards(3), algo="fedavg")
    assert averaging == Bounds(
        liars=1,
        max_norm_ratio=5.0,
        max_update_ratio=2.0,
        max_samples_ratio=8.0,
        max_samples_lead=2.0,
        weight_aggregator=MEAN,
        prototype_aggregator=MEAN,
    )
    assert bounds(cards(3, real=False), algo="fedavg") == Bounds()
    # one site with an operator: then nobody who says so is believed to be simulated
    assert bounds([*cards(3, real=False), *cards(1)], algo="fedavg") == averaging
    assert bounds(cards(2), algo="fedavg") == Bounds()
    assert bounds(cards(6), algo="fedavg", participation=0.33) == Bounds()
    assert bounds(cards(4), algo="fedavg", secagg=True) == Bounds()
    assert bounds(cards(3), algo="fedavg", liars=0) == Bounds()

    distilling = bounds(cards(5, real=False), algo="feddistill", liars=2)
    assert distilling.prototype_aggregator == Aggregator("trimmed-mean", 2)


def test_prototypes_are_trimmed_only_where_they_can_be_compared():
    """Those of networks that began with different weights, or are different, lie anywhere."""
    two_networks = cards(3, archs=("cnn4", "htcnn-1"))
    assert bounds(cards(3)).prototype_aggregator == MEAN
    assert bounds(cards(3), initial_weights="shared").prototype_aggregator == TRIMMED
    assert bounds(two_networks, initial_weights="shared").prototype_aggregator == MEAN

    # one of three names another network than the run, which may be a lie; two of six do not lie
    one_other = cards(3, archs=("cnn4", "mlp-1"))
    shared = {"initial_weights": "shared", "models": "cnn4"}

    assert bounds(one_other, **shared).prototype_aggregator == TRIMMED
    assert bounds([*one_other, *one_other], **shared).prototype_aggregator == MEAN

    assert bounds(cards(3), algo="fedproto-avg").prototype_aggregator == TRIMMED
    assert bounds(cards(3), algo="feddistill").prototype_aggregator == TRIMMED
    for algo in ("fedtgp", "fedplvm"):  # a server trains on them or clusters them
        assert bounds(cards(3), algo=algo, initial_weights="shared").prototype_aggregator == MEAN


@pytest.mark.parametrize("real", [True, False])
def test_an_experts_key_wins(real):
    """Each setting takes the place of the default, at sites and in simulations."""
    found = bounds(
        cards(5, real),
        max_norm_ratio=3.0,
        max_update_ratio=1.0,
        max_samples_ratio=4.0,
        max_samples_lead=1.5,
        merging="median",
        trim_fraction=0.3,
    )
    median = Aggregator("median", 0.3)
    assert found == Bounds(
        liars=1 if real else 0,
        max_norm_ratio=3.0,
        max_update_ratio=1.0,
        max_samples_ratio=4.0,
        max_samples_lead=1.5,
        weight_aggregator=median,
        prototype_aggregator=median,
    )


@pytest.mark.parametrize(("config", "reason"), [
    ({"max-norm-ratio": 0.5}, "max-norm-ratio = 0.5: must be a number 0, or at least 1"),
    ({"merging": "mode"}, "'mode': choose one of auto, mean, median, trimmed-mean"),
    ({"trim-fraction": 0.5}, "0.5: must be a number at least 0 and at most 0.49"),
    ({"liars": 3}, "liars = 3: must be a whole number at least -1 and at most 2"),
    ({"secagg": True, "liars": 1}, "liars = 1: secagg = true hides the single uploads"),
])  # fmt: skip
def test_a_key_that_cannot_be_is_refused(config, reason):
    assert reason in refusal(config)


def test_what_the_defaults_do_at_sites_is_printed_and_stands_in_the_results(tmp_path, capsys):
    """One of four sites sends its update ten times as long and reversed: it is cut in each round.

    The same run with simulated clients has no such defaults.
    """
    small = {
        "dataset": "digits",
        "partition": "iid",
        "train_samples": 20,
        "models": "htcnn-1",
        "rounds": 2,
    }
    config = run_config(tmp_path, algo="fedavg", **small)
    outcome = run_federation(config, nodes=real_sites(4), tamper=by({1003: reversed_update(10)}))
    printed = capsys.readouterr().out

    assert "liars = 1: replies above 5 times the median norm are refused" in printed

    cut = "site-3: its change of the weights is cut to 2 times the median length (max-update-ratio)"
    assert printed.count(f"warning: {cut}") == 1
    assert outcome.summary["bounded"] == [cut]
    assert [row.get("bounded") for row in outcome.rows] == [[cut], [cut], None]

    quiet = run_federation(config | {"out-dir": str(tmp_path / "simulated")}, clients=4)
    assert "liars" not in capsys.readouterr().out
    assert quiet.summary["bounded"] == []


def test_a_poisoned_buffer_moves_with_the_weights_and_no_farther():
    """One of six clients sends a running variance of 40, where others have 1.1 to 1.5.

    The cut of its update bounds that, and the trimmed mean leaves it out.
    """
    start = {"w": torch.zeros(4), "bn.running_var": torch.ones(2)}
    sets = []
    for n in range(1, 7):
        variance = torch.full((2,), 1.0 + 0.1 * n)
        sets.append({"w": torch.full((4,), 0.1 * n), "bn.running_var": variance})
    poisoned = 5
    sets[poisoned]["bn.running_var"] = torch.full((2,), 40.0)

    clipped = clip_updates(sets, received=[start] * 6, ratio=2.0)
    merged = TRIMMED.merge_weights(clipped, [1 / 6] * 6)

    assert float(clipped[poisoned]["bn.running_var"].max()) < 3
    assert 1.1 <= float(merged["bn.running_var"].max()) <= 1.5
