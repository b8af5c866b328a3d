"""Privacy on the wire: every byte that a client sends belongs to what its algorithm declares.

In an in-process federation every reply is serialised as Flower does it, then read and written anew.
Both must be the same, byte for byte, and have only what is declared: there is no further record,
field, or padding. What the values are is checked too: prototypes are the class means (cluster
means) of the model that the client keeps, and none is the feature of a single sample.
"""

import json
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from flwr.app import Message, MessageType, RecordDict
from flwr.proto import recorddict_pb2 as proto
from safetensors.torch import load_file

from client_app import app as client_module
from client_app import introduction, trained_model
from client_app.algorithms.base import ClientAlgorithm
from client_app.introduction import card_of
from client_app.protections import secure_sum
from client_app.site.record import StateError
from protofl_common.backbones.load import BackboneError
from protofl_common.data import DataError
from protofl_common.experiment.catalog import CATALOG
from protofl_common.maths.prototypes import Prototypes
from protofl_common.runs.folder import RunFolder
from protofl_common.wire.records import NEXT_SUM
from protofl_common.wire.refusal import Refusal, pack_refusal
from tests.support.anew import RECORDS, bytes_of, read_anew, values_in
from tests.support.attacks import card_with, values_of
from tests.support.declared import DECLARED
from tests.support.harness import (
    LocalGrid,
    client_of,
    failures_in,
    federate,
    rows_without_a_reply,
    run_config,
    run_federation,
)
from tests.support.hostile import ATTACKS
from tests.support.sites import real_sites

CLIENTS, ROUNDS = 3, 2
NODE = 7
"""Flower's number of a site that is asked alone."""


def small_config(folder, algo, **settings):
    """Return the settings of clients with five classes each, and at least three samples of each."""
    data = {
        "dataset": "digits",
        "partition": "pathological",
        "classes_per_client": 5,
        "train_samples": 40,
    }
    return run_config(folder, **{"algo": algo, "rounds": ROUNDS} | data | settings)


def real_nodes(folder, **node):
    """Return node configs of sites with operators; each has a folder of its own for its state."""
    return real_sites(CLIENTS, folder / "private-disk", **{"data-dir": "/srv/ours"} | node)


def federation(folder, algo, **settings):
    """Make a run of three sites, each with a folder of its own for its state."""
    return run_federation(small_config(folder, algo, **settings), nodes=real_nodes(folder))


State = dict[str, torch.Tensor]


MODULES = {}
"""Site -> its modules (its model, and what it sends) as they were when it last packed its state."""


@pytest.fixture(autouse=True)
def _modules_are_noted(monkeypatch):
    """Fill `MODULES` during each test: a client packs its state last after its upload is made."""
    packed_state = ClientAlgorithm.packed_state

    def noted(self):
        declared = DECLARED[self.settings.run.algo]
        names = {"model", declared.of, declared.own, *declared.beside.values()}
        modules = {name: getattr(self, name).state_dict() for name in names}
        if declared.since:
            modules["since"] = getattr(self, declared.since)
        MODULES[self.client.name] = deepcopy(modules)
        return packed_state(self)

    MODULES.clear()
    monkeypatch.setattr(ClientAlgorithm, "packed_state", noted)


# -- what is read from a reply, and what a client has ---------------------------------------------


def assert_only_declared(algo, kind, number, text):
    """Check that a reply of a run without protections has all that its algorithm declares.

    It must have nothing else. ``text`` are the bytes of the reply in round ``number``. Return the
    arrays of each record.
    """
    found, arrays = read_anew(algo, kind, text)
    if kind == MessageType.QUERY:
        assert found == {"site"}
        return {}
    if kind != MessageType.TRAIN:
        assert found == {"report"}
        return {}

    wanted = set(DECLARED[algo].records)
    if algo == "protofed" and number < ROUNDS:  # it sends prototypes in the last round only
        wanted.remove("prototypes")
    assert found == {"report", *wanted}
    record_name = DECLARED[algo].record
    if record_name in wanted:
        assert set(arrays[record_name]) == set(DECLARED[algo].prototypes), "an undeclared array"
    return arrays


def assert_no_local_paths(outcome, folder, text):
    """A reply has neither the folders that a client uses, nor anything like a path in a text."""
    cache = outcome.grid.run_config["cache-dir"]
    for place in (folder, Path.home(), Path.cwd(), cache, "private-disk", "/srv/ours"):
        assert str(place).encode() not in text, "a path"
    for record in proto.RecordDict.FromString(text).items:
        for field in record.config_record.items:
            for word in (field.value.string, *field.value.string_list.vals):
                assert "/" not in word, "a path"
                assert "\\" not in word, "a path"


def assert_stored_as_declared(state_dir, declared, modules):
    """A client stores its own model and what its algorithm keeps, and not what is averaged."""
    files = list(state_dir.rglob("0*.safetensors"))  # states are named by their round: 000002-…
    keeps_anything = declared.keeps_model or bool(declared.keeps)
    assert len(files) == (1 if keeps_anything else 0)

    kept_beside = tuple(f"{name}/" for name in declared.keeps)
    kept_beside += tuple(f"{name}:" for name in declared.keeps)
    wanted = {}
    if declared.keeps_model:
        for name, value in modules[declared.own].items():
            wanted[f"{declared.own}/{name}"] = value
    for path in files:
        stored = load_file(path)
        assert {name for name in stored if not name.startswith(kept_beside)} == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(stored[name], value)


@dataclass(frozen=True)
class Own:
    """What a client has, and its upload may tell of."""

    features: np.ndarray
    """[N, D], of its training data under its last model."""
    labels: np.ndarray
    """[N]."""
    leaving: State
    """The weights that it may send."""


def own_of(outcome, algo, index):
    """Return what the client ``index`` has after a run; check on the way what it has stored."""
    declared = DECLARED[algo]
    node = outcome.grid.nodes[1000 + index]
    site = client_of(outcome.grid.run_config, **node)
    modules = MODULES[site.name]
    assert_stored_as_declared(Path(str(node["state-dir"])), declared, modules)

    body = {}
    for name, value in modules["model"].items():
        if name.startswith("body."):
            body[name.removeprefix("body.")] = value
    if body:
        site.model.body.load_state_dict(body)
    features = site.train_set.inputs
    if not declared.frozen:
        with torch.no_grad():
            features = site.model.eval().body(features)
    if algo in ("fedpcl", "fednh"):  # their prototypes are of features of length 1
        features = features / features.norm(dim=1, keepdim=True)

    leaving = {}
    for name, value in modules[declared.of].items():
        if not name.startswith(declared.stays):
            leaving[name] = value
    return Own(features.double().numpy(), site.train_set.labels.numpy(), leaving)


# -- what the values are --------------------------------------------------------------------------


def assert_means(arrays, own, algo):
    """They are means over several samples of one class each; never the feature of one."""
    labels = arrays["labels"].tolist()
    means = arrays["means"].astype(np.float64)
    assert set(labels) == set(own.labels.tolist())
    for mean, label in zip(means, labels, strict=True):
        of_class = own.features[own.labels == label]
        assert len(of_class) >= 3  # or the mean could be that of one sample
        distances = np.abs(of_class - mean).max(axis=1)
        assert distances.min() > 1e-4 * np.abs(of_class).max(), "the feature of a single sample"
        if DECLARED[algo].several:  # a cluster's mean lies among its class
            assert (of_class.min(axis=0) - 1e-4 <= mean).all()
            assert (mean <= of_class.max(axis=0) + 1e-4).all()
        else:
            np.testing.assert_allclose(mean, of_class.mean(axis=0), rtol=1e-3, atol=1e-4)
    if "counts" in arrays:
        counts = [int((own.labels == label).sum()) for label in labels]
        assert arrays["counts"].tolist() == counts


def assert_outputs(arrays, own):
    """Outputs are shares that sum to 1; that they are means, their algorithm's own script proves.

    They are means over all steps of the training, so the last model does not give them.
    """
    assert set(arrays["labels"].tolist()) == set(own.labels.tolist())
    np.testing.assert_allclose(arrays["means"].sum(axis=1), 1, atol=1e-3)


def assert_layer(arrays, name, module):
    """The arrays are a module's layer of this name, or all of a module without such a layer."""
    of_layer = {key for key in module if key.startswith(f"{name}.")}
    keys = of_layer or set(module)
    assert arrays.keys() == keys
    assert keys
    for key in keys:
        assert np.array_equal(arrays[key], module[key].numpy())


def assert_weights(arrays, own, since):
    """They are the weights that may leave, or their changes since the round began."""
    if since is None:
        assert set(arrays) == set(own.leaving)
        for name, value in own.leaving.items():
            assert np.array_equal(arrays[name], value.numpy())
    else:
        assert_changes(arrays, own.leaving, since)


def assert_changes(arrays, after, before):
    """Changes of weights travel whole, or as two factors of a matrix of lower rank.

    The singular values that these leave out have 5 % of the sum of squares at most.
    """
    unread = dict(arrays)
    for name, value in after.items():
        change = (value - before[name]).numpy()
        if name in unread:
            assert np.array_equal(unread.pop(name), change)
            continue
        left = unread.pop(f"{name}:left")
        right = unread.pop(f"{name}:right")
        rest = change.reshape(len(change), -1) - left @ right
        assert left.size + right.size < change.size
        assert np.square(rest).sum() <= 0.051 * np.square(change).sum()
    assert not unread, "an undeclared array"


def assert_last_upload(arrays, outcome, algo, index):
    """Every array of the last round comes from what the client has."""
    own = own_of(outcome, algo, index)
    modules = MODULES[f"site-{index}"]
    if "prototypes" in arrays:
        assert_means(arrays["prototypes"], own, algo)
    if "outputs" in arrays:
        assert_outputs(arrays["outputs"], own)
    for name, module in DECLARED[algo].beside.items():
        assert_layer(arrays[name], name, modules[module])
    if "label_counts" in arrays:
        counts = np.bincount(own.labels, minlength=10)
        assert set(arrays["label_counts"]) == {"counts"}
        assert np.array_equal(arrays["label_counts"]["counts"], counts)
    if "weights" in arrays:
        assert_weights(arrays["weights"], own, modules.get("since"))


def assert_private(outcome, folder, algo):
    """Every reply of a run has what its algorithm declares, no more, and no path.

    In the last round every array must come from what the client has.
    """
    kinds = []
    for message, reply in outcome.grid.log:
        kind = message.metadata.message_type
        number = int(message.metadata.group_id)
        text = bytes_of(reply.content)
        arrays = assert_only_declared(algo, kind, number, text)
        assert_no_local_paths(outcome, folder, text)
        if kind == MessageType.TRAIN and number == ROUNDS:
            assert_last_upload(arrays, outcome, algo, message.metadata.dst_node_id - 1000)
        kinds.append(kind)
    of_each = [MessageType.QUERY, MessageType.EVALUATE, *ROUNDS * [MessageType.TRAIN]]
    assert sorted(kinds) == sorted(CLIENTS * of_each)


@pytest.mark.parametrize("algo", DECLARED)
def test_every_byte_of_every_reply_is_declared(algo, tmp_path):
    assert_private(federation(tmp_path, algo), tmp_path, algo)


# -- a client that sends more is found out --------------------------------------------------------

FOUND_BY_READING = {
    (MessageType.QUERY, "a field more"): "an undeclared field",
    (MessageType.TRAIN, "features beside the prototypes"): "an undeclared record",
    (MessageType.TRAIN, "features among the prototypes"): "an undeclared array",
    (MessageType.TRAIN, "bytes after an array"): "bytes beyond the shape",
    (MessageType.TRAIN, "an undeclared text"): "an undeclared record",
    (MessageType.TRAIN, "an undeclared number"): "an undeclared number losses.feature",
    (MessageType.TRAIN, "a list in place of a number"): "not a single number",
}
"""Attacks that carry more than is declared -> what the reader of their bytes says."""


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    return federation(tmp_path_factory.mktemp("honest"), "fedproto")


def assert_found_out(honest, kind, change, found, folder):
    """`assert_private` fails for an honest run's reply with this change, and says ``found``."""
    (message, reply), *_of_other_clients = honest.exchanged(kind)
    sent = change(message, Message(deepcopy(reply.content), reply_to=message))
    grid = SimpleNamespace(log=[(message, sent)], run_config=honest.grid.run_config)
    with pytest.raises(AssertionError, match=found):
        assert_private(SimpleNamespace(grid=grid), folder, "fedproto")


@pytest.mark.parametrize(("kind", "attack"), FOUND_BY_READING)
def test_a_client_that_sends_more_is_found_out(kind, attack, honest, tmp_path):
    """`assert_private` can fail. The server refuses such a client, too (`test_hostile.py`)."""
    change, _ = ATTACKS[kind][attack]
    assert_found_out(honest, kind, change, FOUND_BY_READING[kind, attack], tmp_path)


def test_a_path_in_an_introduction_is_found_out(honest, tmp_path):
    change = card_with(domain="/srv/scans")
    assert_found_out(honest, MessageType.QUERY, change, "a path", tmp_path)


def test_a_sample_in_place_of_a_mean_is_found_out(tmp_path, monkeypatch):
    """`assert_private` fails for a run whose clients send one feature as a prototype."""
    local_prototypes = ClientAlgorithm.local_prototypes

    def with_a_sample(self):
        """Return prototypes of which the first is the feature of one sample of its class."""
        true = local_prototypes(self)
        samples = self.client.train_set.inputs[self.client.train_set.labels == true.labels[0]]
        feature = self.model.body(samples[:1]).detach()
        return Prototypes(torch.cat([feature, true.means[1:]]), true.labels, true.counts)

    monkeypatch.setattr(ClientAlgorithm, "local_prototypes", with_a_sample)

    outcome = federation(tmp_path, "fedproto")

    with pytest.raises(AssertionError, match="of a single sample"):
        assert_private(outcome, tmp_path, "fedproto")


# -- every byte of every record under every protection is declared, too ---------------------------

ASKED = {  # what a run asks for -> its settings
    "nothing": {"keep_best": True, "baselines": "local"},
    "validation": {"validation_fraction": 0.3, "metrics": "auc,recall", "min_class_samples": 3},
    "masks, an early end": {
        "secagg": True,
        "rounds": 4,
        "early_stopping": 1,
        "lr": 1e-6,
        "validation_fraction": 0.3,
    },
    "noise": {"dp": "sample", "dp_epsilon": 50.0, "norm": "group", "validation_fraction": 0.3},
    "noise under masks": {"dp": "sample", "secagg": True, "norm": "group"},
}
METRICS = ("auc", *(f"recall/{label}" for label in range(10)))


@pytest.fixture(scope="module")
def run_asking_for(tmp_path_factory):
    """Make the runs of `ASKED` with FedProto: together they ask for all that a client may tell."""
    small = {"models": "mlp-1", "feature_dim": 16, "test_samples": 20}
    outcomes = {}
    for name, settings in ASKED.items():
        outcome = federation(tmp_path_factory.mktemp("asked"), "fedproto", **small | settings)
        assert not outcome.trouble
        outcomes[name] = outcome
    return outcomes


def test_every_record_that_a_client_can_send_is_read(run_asking_for):
    """Runs with all protections have every kind of message and every record, and no other.

    So a new handler, record or number fails here, or in its algorithm's test, until it is declared.
    """
    records_sent = {}
    for outcome in run_asking_for.values():
        for message, reply in outcome.grid.log:
            kind = message.metadata.message_type
            text = bytes_of(reply.content)
            baseline = message.content.config_records.get("baseline", {"algo": "fedproto"})
            names, _ = read_anew(str(baseline["algo"]), kind, text, METRICS)
            records_sent.setdefault(kind, set()).update(names)
            assert_no_local_paths(outcome, outcome.folder.parent.parent, text)
    for row in CATALOG.values():
        records_sent[MessageType.TRAIN].update(row.exchange.up)

    handlers = {name.removesuffix(".default") for name in client_module.app._registered_funcs}
    assert handlers == set(RECORDS)
    assert records_sent == RECORDS


@pytest.mark.parametrize(
    ("what", "present", "uploaded"),
    [
        ("noise", [*range(10)], {"report", "prototypes"}),
        ("noise under masks", [], {"report", "masked", NEXT_SUM}),
    ],
)
def test_under_differential_privacy_replies_tell_no_losses_and_no_classes(
    what, present, uploaded, run_asking_for
):
    """An introduction names all classes, or none with secure aggregation; ledgers are by sample."""
    for message, reply in run_asking_for[what].grid.log:
        kind = message.metadata.message_type
        names, arrays = read_anew("fedproto", kind, bytes_of(reply.content))
        if names == {"site"}:
            assert list(reply.content.config_records["site"]["present"]) == present
        if "report" in names:
            report = reply.content.metric_records["report"]
            assert not [name for name in report if name.startswith("losses")]
            assert ("epsilon" in report) == (what == "noise")
        if "prototypes" in arrays:
            assert arrays["prototypes"]["counts"].sum() <= 40  # the training samples
        if kind == MessageType.TRAIN:
            assert names == uploaded

    accounts = list(run_asking_for[what].folder.parent.parent.glob("private-disk-*/privacy/*.json"))
    assert len(accounts) == 2 * CLIENTS  # of the client's name, and of its data

    for account in accounts:
        (spent,) = json.loads(account.read_text()).values()
        for _rate, _noise, unit, times in spent:
            assert isinstance(times, int)
            assert unit == "sample"


def sent_means(outcome):
    """Return all numbers of all prototypes that were sent in a run."""
    numbers = []
    for _, reply in outcome.grid.log:
        if "prototypes" in reply.content:
            numbers.append(values_of(reply.content["prototypes"]["means"]).ravel())
    return np.concatenate(numbers)


def test_class_means_under_differential_privacy_are_not_the_true_ones(run_asking_for):
    """With 40 samples even an ε of 50 leaves much noise in every number of a prototype."""
    true = sent_means(run_asking_for["nothing"])
    noisy = sent_means(run_asking_for["noise"])

    assert np.abs(noisy).mean() > 0.1
    # a few numbers in float32 are equal by chance
    assert np.isin(noisy, true[true != 0]).mean() < 0.001


# -- errors ---------------------------------------------------------------------------------------

SECRET = "cannot read 0.25 0.75 of tumour in /srv/scans/a.png"
SAID = {
    OSError: "an unexpected error",
    KeyError: "an unexpected error",
    DataError: "its data cannot be read or divided as the run asks",
    StateError: "its state (models, requests, counts) cannot be read or written",
    BackboneError: "a frozen backbone cannot be had",
}


@pytest.mark.parametrize("kind", RECORDS)
def test_an_error_says_its_kind_and_nothing_of_the_data(kind, tmp_path, monkeypatch):
    """Whatever fails, in whatever part of a round, at a site with an operator."""
    # the checkout's own state-dir would count the refusals of all tests of a day
    node = {"site-name": "north", "state-dir": str(tmp_path)}
    grid = LocalGrid(run_config(tmp_path), {NODE: node})
    name = "north" if kind == MessageType.QUERY else ""  # an introduction alone names the site

    for error, said in SAID.items():
        for module in (client_module, introduction, secure_sum, trained_model):
            monkeypatch.setattr(module, "open_client", MagicMock(side_effect=error(SECRET)))
        reply = grid.ask(Message(RecordDict(), NODE, kind, group_id="1"))
        line = f"{error.__name__}: {said}; the log of the site says more"
        assert reply.error.reason == pack_refusal(Refusal(line, site=name))


def test_an_error_names_no_file_of_a_site_and_no_folder(tmp_path, monkeypatch, capsys):
    """An error of training quotes two paths: a site tells the server its kind alone.

    A simulated client shortens paths to file names. The log has the whole text.
    """
    text = f"cannot open {tmp_path}/private-disk-0/scans/a.png, nor '{Path.home()}/my scans/b.png'"
    monkeypatch.setattr(ClientAlgorithm, "fit", MagicMock(side_effect=OSError(text)))

    def reasons(folder, **options):
        """Return why the clients of a run fail."""
        rows = rows_without_a_reply(small_config(folder, "local"), CLIENTS, **options)
        return set(failures_in(rows))

    of_sites = reasons(tmp_path / "sites", nodes=real_nodes(tmp_path / "sites"))
    assert of_sites == {"OSError: an unexpected error; the log of the site says more"}
    assert f"OSError: {text}" in capsys.readouterr().err

    simulated = reasons(tmp_path / "simulated")
    assert simulated == {"OSError: cannot open …/a.png, nor '…/my scans/b.png'"}


# -- small classes --------------------------------------------------------------------------------


def run_of_unequal_sites(folder, algo, least, node=None, **settings):
    """Make a run of three sites that have some classes of one sample and some of many.

    ``least`` is the run's min-class-samples, and ``node`` stands in every node config.
    """
    data = {
        "dataset": "digits",
        "partition": "dirichlet",
        "alpha": 0.5,
        "total_samples": 150,
        "train_samples": 0,
        "test_samples": 30,
    }
    small = {"models": "mlp-1", "feature_dim": 16, "rounds": 1, "fedgen__server_steps": 2}
    if algo in ("fedpcl", "mpft", "gaussian"):
        small["backbones"] = "glyphs"
    facts = data | small | {"min_class_samples": least} | settings
    return federate(folder, nodes=real_nodes(folder, **(node or {})), algo=algo, **facts)


def client_asked(outcome, message):
    """Return the client that a message was sent to, with its data."""
    node = outcome.grid.nodes[message.metadata.dst_node_id]
    return client_of(outcome.grid.run_config, **node)


@pytest.mark.parametrize(
    "algo", [algo for algo, one in DECLARED.items() if one.prototypes or one.label_counts]
)
def test_nothing_is_told_of_classes_with_few_samples(algo, tmp_path):
    """The sites demand six samples of a class, where the run asks for two only.

    Neither introductions nor uploads tell of smaller classes; of larger ones they tell. Where a
    class has several prototypes, each is of a cluster of six samples or more.
    """
    least = 6
    outcome = run_of_unequal_sites(tmp_path, algo, least=2, node={"min-class-samples": least})

    assert not outcome.trouble

    sites = RunFolder(outcome.folder).sites()["sites"]
    classes_told = 0
    for message, reply in outcome.grid.log:
        client = client_asked(outcome, message)
        counts = np.bincount(client.data.train_labels, minlength=10)
        large = np.flatnonzero(counts >= least).tolist()
        assert (counts[counts < least] > 0).any()  # each client has something to hide

        # a number of all samples would show how many are in small classes
        assert sites[client.name]["train-samples"] == counts[large].sum()
        if "site" in reply.content:
            assert reply.content["site"]["present"] == large
        for name in {"prototypes", "outputs"} & reply.content.keys():
            arrays = values_in(reply.content[name])
            labels = arrays["labels"]
            prototypes_of_class = np.bincount(labels, minlength=10)
            assert sorted(set(labels.tolist())) == large
            assert (arrays.get("counts", counts[labels]) >= least).all()
            assert (prototypes_of_class <= counts // least).all()
            classes_told += len(large)
        if "label_counts" in reply.content:
            told = values_in(reply.content["label_counts"])["counts"]
            assert told.tolist() == np.where(counts >= least, counts, 0).tolist()
            classes_told += len(large)

    assert classes_told


@pytest.mark.parametrize(
    ("node", "run", "least"),
    [
        ({"min-class-samples": 5}, 1, 5),
        ({"min-class-samples": 5}, 9, 9),
        ({}, 3, 3),
    ],
)
def test_a_site_may_raise_the_least_number_and_never_lower_it(node, run, least, tmp_path):
    config = run_config(tmp_path, min_class_samples=run)
    client = client_of(config, **{"site-name": "north"}, **node)
    assert client.settings.privacy.min_class_samples == least


def test_a_client_without_a_large_class_says_so_at_once(tmp_path):
    """With min-class-samples = 999 there is nothing that it may tell of."""
    config = run_config(tmp_path, min_class_samples=999)
    assert client_of(config, **{"site-name": "north"}).stated_samples == 0
    for algo in ("fedproto", "fedavg"):
        with pytest.raises(Exception, match="min-class-samples = 999: this client has no class"):
            run_of_unequal_sites(tmp_path, algo, least=999)


@pytest.mark.parametrize("least", [3, 25])
def test_recalls_of_classes_with_few_test_samples_do_not_leave(least, tmp_path):
    """Few are fewer than 20, or than ``min-class-samples`` if that is more.

    Where all small classes together have so few, the smallest of the others is left out, too.
    """
    sizes = {"total_samples": 1500, "test_samples": 240, "alpha": 0.3}
    outcome = run_of_unequal_sites(tmp_path, "fedproto", least, metrics="recall,auc", **sizes)

    recalls_told = 0
    introductions = CLIENTS  # come first
    for message, reply in outcome.grid.log[introductions:]:
        report = reply.content["report"]
        told = {name.rpartition("/")[2] for name in report if "/recall/" in name}
        counts = np.bincount(client_asked(outcome, message).data.test_labels, minlength=10)
        large = sorted(counts[counts >= max(least, 20)])
        smallest_told = large[0]  # all classes are told of, or all but the smallest
        assert told == {str(label) for label in range(10) if counts[label] >= smallest_told}
        assert ("metrics.head/auc" in report) == (len(told) > 1)
        recalls_told += len(told)

    assert recalls_told


@pytest.mark.parametrize(("least", "test_samples"), [(2, 19), (25, 24)])
def test_no_figure_of_few_samples_leaves_and_the_run_does_without(least, test_samples, tmp_path):
    """Few are fewer than 20, or than ``min-class-samples``, of test and of validation samples each.

    Without figures the run goes on to its end, and makes its report.
    """
    settings = {
        "total_samples": 900,
        "test_samples": test_samples,
        "validation_fraction": 0.3,
        "metrics": "auc",
        "keep_best": True,
        "report": True,
        "rounds": 2,
    }
    outcome = run_of_unequal_sites(tmp_path, "fedproto", least, **settings)

    assert not outcome.trouble
    assert outcome.summary["accuracy"] == outcome.summary["metrics"] == {}
    assert (outcome.folder / "report.html").exists()

    reports = []
    for _, reply in outcome.grid.log:
        if "report" in reply.content:
            reports.append(reply.content["report"])
    assert reports

    for report in reports:
        assert not [name for name in report if name.startswith(("correct", "metrics"))]
        is_validated = any(name.startswith("validation.") for name in report)
        assert is_validated == (report["validation_samples"] >= max(least, 20))


def test_classes_are_told_at_joining_only_where_uploads_will_tell_them(tmp_path):
    """Clients with five classes of ten introduce themselves with these, or with none."""
    for algo, declared in DECLARED.items():
        site = client_of(small_config(tmp_path, algo), partition=1)
        held = sorted(set(site.data.train_labels.tolist()))
        assert len(held) == 5
        assert list(card_of(site, 1, "").present) == (held if declared.tells_classes else [])
