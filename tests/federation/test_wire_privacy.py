"""Privacy on the wire: every byte that a client sends belongs to what its algorithm declares.

In an in-process federation every reply is serialised as Flower does it. The declared values alone are then read from
the bytes with NumPy, and written anew with Flower's protobuf classes: both must be the same, byte for byte. So there
is no further record, field, or padding. What the values are is checked too: prototypes are the class means (cluster
means) of the model that the client keeps, and none is the feature of a single sample.
"""

import json
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.common.serde import recorddict_to_proto
from flwr.proto import recorddict_pb2 as proto
from flwr.supercore.task_identity import TaskIdentity
from safetensors.torch import load_file

from client_app import app as client_module
from client_app import introduction, trained_model
from client_app.algorithms.base import ClientAlgorithm
from client_app.introduction import card_of
from client_app.protections import secure_sum
from client_app.state import StateError
from protofl_common.backbones.load import BackboneError
from protofl_common.config.options import SettingsError
from protofl_common.data import DataError
from protofl_common.experiment.catalog import CATALOG
from protofl_common.maths.prototypes import Prototypes
from protofl_common.runs.folder import RunFolder
from protofl_common.wire import records
from protofl_common.wire.payloads import RAW
from protofl_common.wire.records import NEXT_SUM, pack_site_card, unpack_site_card
from protofl_common.wire.schema import RefusedMessage
from tests.support.anew import RECORDS, arrays_anew, bytes_of, read_anew
from tests.support.attacks import raw, values_of
from tests.support.declared import DECLARED, SITE
from tests.support.given import Patch, Printed
from tests.support.harness import (
    LocalGrid,
    Outcome,
    client_of,
    rows_without_a_reply,
    run_config,
    run_federation,
)
from tests.support.sites import real_sites

CLIENTS, ROUNDS = 3, 2


def small_config(folder: Path, algo: str, **settings: Any) -> dict[str, Any]:
    """Five classes each, at least three samples of each."""
    data = {
        "dataset": "digits",
        "partition": "pathological",
        "classes_per_client": 5,
        "train_samples": 40,
    }
    return run_config(folder, **{"algo": algo, "rounds": ROUNDS} | data | settings)


def federation(folder: Path, algo: str, **settings: Any) -> Outcome:
    """Three clients, each with a folder of its own."""
    return run_federation(small_config(folder, algo, **settings), nodes=real_nodes(folder))


def real_nodes(folder: Path, **more: Any) -> dict[int, dict[str, Any]]:
    """Node configs of machines with operators, who have files of their own, too."""
    return real_sites(CLIENTS, folder / "private-disk", **{"data-dir": "/srv/ours"} | more)


State = dict[str, torch.Tensor]
TRAINED: dict[str, dict[str, Any]] = {}
"""Site -> its modules when it had packed its upload, in the last run's last round: its model, what it sends."""


@pytest.fixture(autouse=True)
def _trained(monkeypatch: Patch) -> None:
    packed_state = ClientAlgorithm.packed_state

    def noted(self: ClientAlgorithm[Any]) -> dict[str, torch.Tensor]:
        declared = DECLARED[self.settings.run.algo]
        sent = {"model", declared.of, declared.own, *declared.beside.values()}
        modules = {name: getattr(self, name).state_dict() for name in sent}
        if declared.since:
            modules["since"] = getattr(self, declared.since)
        TRAINED[self.client.name] = deepcopy(modules)
        return packed_state(self)

    TRAINED.clear()
    monkeypatch.setattr(ClientAlgorithm, "packed_state", noted)


def assert_only_declared(
    algo: str, kind: str, round_number: int, text: bytes
) -> dict[str, dict[str, np.ndarray]]:
    """Of a run without protections: read a reply, and find all that its algorithm declares; the arrays read."""
    found, arrays = read_anew(algo, kind, text)
    if kind != MessageType.TRAIN:
        assert found == {"site" if kind == MessageType.QUERY else "report"}
        return {}
    wanted = set(DECLARED[algo].records)
    if algo == "protofed" and round_number < ROUNDS:
        wanted.remove("prototypes")
    assert found == {"report", *wanted}
    if (record_name := DECLARED[algo].record) in wanted:
        assert set(arrays[record_name]) == set(DECLARED[algo].prototypes), "an undeclared array"
    return arrays


def kept_by(
    outcome: Outcome, algo: str, index: int
) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Features [N, D] and labels [N] of a client's training data under its last model; the weights that it may send."""
    node = outcome.grid.nodes[1000 + index]
    site = client_of(outcome.grid.run_config, **node)
    state, sent = TRAINED[site.name]["model"], TRAINED[site.name][DECLARED[algo].of]
    own = DECLARED[algo].own
    files = list(Path(str(node["state-dir"])).rglob("0*.safetensors"))
    assert len(files) == (
        DECLARED[algo].keeps_model or bool(DECLARED[algo].keeps)
    )  # what is averaged is not stored
    for path in files:
        kept = load_file(path)
        beside = tuple(name + mark for name in DECLARED[algo].keeps for mark in "/:")
        model = TRAINED[site.name][own] if DECLARED[algo].keeps_model else {}
        wanted = {f"{own}/{name}": value for name, value in model.items()}
        assert {name for name in kept if not name.startswith(beside)} == wanted.keys()
        assert all(torch.equal(kept[name], value) for name, value in wanted.items())
    body = {
        name.removeprefix("body."): value
        for name, value in state.items()
        if name.startswith("body.")
    }
    if body:
        site.model.body.load_state_dict(body)
    with torch.no_grad():
        inputs = site.train_set.inputs
        features = inputs if DECLARED[algo].frozen else site.model.eval().body(inputs)
    if algo in ("fedpcl", "fednh"):
        features = features / features.norm(dim=1, keepdim=True)
    leaves = {
        name: value for name, value in sent.items() if not name.startswith(DECLARED[algo].stays)
    }
    return features.double().numpy(), site.train_set.labels.numpy(), leaves


def assert_means(
    arrays: dict[str, np.ndarray], features: np.ndarray, labels: np.ndarray, algo: str
) -> None:
    """Means over several samples of one class each; never the feature of one."""
    means = arrays["means"].astype(np.float64)
    assert set(arrays["labels"].tolist()) == set(labels.tolist())
    for mean, label in zip(means, arrays["labels"], strict=True):
        of_class = features[labels == label]
        assert len(of_class) >= 3
        apart = np.abs(of_class - mean).max(axis=1)
        assert apart.min() > 1e-4 * np.abs(of_class).max(), "the feature of a single sample"
        if not DECLARED[algo].several:
            np.testing.assert_allclose(mean, of_class.mean(axis=0), rtol=1e-3, atol=1e-4)
        else:  # a cluster's mean lies among its class
            assert (of_class.min(axis=0) - 1e-4 <= mean).all()
            assert (mean <= of_class.max(axis=0) + 1e-4).all()
    if "counts" in arrays:
        assert arrays["counts"].tolist() == [
            int((labels == label).sum()) for label in arrays["labels"]
        ]


def in_place_of_factors(
    sent: dict[str, np.ndarray], after: State, before: State
) -> dict[str, np.ndarray]:
    """The weights whose change was sent, without the smallest singular values that factors leave out, 5 % at most."""
    found = {}
    for name, value in after.items():
        change = (value - before[name]).numpy()
        if name in sent:
            assert np.array_equal(sent.pop(name), change)
        else:
            left, right = sent.pop(f"{name}:left"), sent.pop(f"{name}:right")
            rest = change.reshape(len(change), -1) - left @ right
            assert left.size + right.size < change.size
            assert np.square(rest).sum() <= 0.051 * np.square(change).sum()
        found[name] = value.numpy()
    assert not sent, "an undeclared array"
    return found


def assert_no_local_paths(outcome: Outcome, folder: Path, text: bytes) -> None:
    """Neither the folders that the client uses, nor anything like a path in a text."""
    places = [
        folder,
        Path.home(),
        Path.cwd(),
        outcome.grid.run_config["cache-dir"],
        "private-disk",
        "/srv/ours",
    ]
    assert not any(str(place).encode() in text for place in places), "a path"
    for item in proto.RecordDict.FromString(text).items:
        for field in item.config_record.items:
            words = [field.value.string, *field.value.string_list.vals]
            assert not any("/" in word or "\\" in word for word in words), "a path"


def assert_private(outcome: Any, folder: Path, algo: str) -> None:
    """All of it, for every reply of a run."""
    kinds = []
    for message, reply in outcome.grid.log:
        kind, round_number = message.metadata.message_type, int(message.metadata.group_id)
        text = bytes_of(reply.content)
        arrays = assert_only_declared(algo, kind, round_number, text)
        assert_no_local_paths(outcome, folder, text)
        kinds.append(kind)
        if kind == MessageType.TRAIN and round_number == ROUNDS:
            index = message.metadata.dst_node_id - 1000
            (features, labels, leaves), modules = (
                kept_by(outcome, algo, index),
                TRAINED[f"site-{index}"],
            )
            if "prototypes" in arrays:
                assert_means(arrays["prototypes"], features, labels, algo)
            if "outputs" in arrays:  # means over the training, which its own script proves
                assert set(arrays["outputs"]["labels"].tolist()) == set(labels.tolist())
                np.testing.assert_allclose(arrays["outputs"]["means"].sum(axis=1), 1, atol=1e-3)
            for name, of in DECLARED[algo].beside.items():
                keys = [key for key in modules[of] if key.startswith(f"{name}.")] or list(
                    modules[of]
                )
                assert arrays[name].keys() == set(keys) != set()
                assert all(
                    np.array_equal(arrays[name][key], modules[of][key].numpy()) for key in keys
                )
            if "label_counts" in arrays:
                assert set(arrays["label_counts"]) == {"counts"}
                assert np.array_equal(
                    arrays["label_counts"]["counts"], np.bincount(labels, minlength=10)
                )
            if "weights" in arrays:
                since = modules.get("since")
                found = (
                    arrays["weights"]
                    if since is None
                    else in_place_of_factors(arrays["weights"], leaves, since)
                )
                assert set(found) == set(leaves)
                assert all(
                    np.array_equal(found[name], value.numpy()) for name, value in leaves.items()
                )
    assert sorted(kinds) == sorted(
        CLIENTS * [MessageType.QUERY, MessageType.EVALUATE, *ROUNDS * [MessageType.TRAIN]]
    )


@pytest.mark.parametrize("algo", DECLARED)
def test_every_byte_of_every_reply_is_declared(algo: str, tmp_path: Path) -> None:
    assert_private(federation(tmp_path, algo), tmp_path, algo)


# -- and so is every byte of every record under every protection -------------------------------------------------------

ASKED: dict[str, dict[str, Any]] = {
    "nothing": {"keep_best": True, "baselines": "local"},
    "validation": {"validation_fraction": 0.3, "metrics": "auc,recall", "min_class_samples": 3},
    "masks, an early end": {"secagg": True, "rounds": 4, "early_stopping": 1, "lr": 1e-6, "validation_fraction": 0.3},
    "noise": {"dp": "sample", "dp_epsilon": 50.0, "norm": "group", "validation_fraction": 0.3},
    "noise under masks": {"dp": "sample", "secagg": True, "norm": "group"},
}  # fmt: skip
METRICS = ("auc", *(f"recall/{label}" for label in range(10)))


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Runs of FedProto that ask for all that a client may tell."""
    small = {"models": "mlp-1", "feature_dim": 16, "test_samples": 20}
    found = {}
    for name, changes in ASKED.items():
        found[name] = federation(tmp_path_factory.mktemp("asked"), "fedproto", **small | changes)
        assert not any(found[name].summary["trouble"].values())
    return found


def test_every_record_that_a_client_can_send_is_read(asked: dict[str, Outcome]) -> None:
    """A new handler, record or number fails here, or in the test of its algorithm, until it is declared."""
    seen: dict[str, set[str]] = {}
    for outcome in asked.values():
        for message, reply in outcome.grid.log:
            kind, text = message.metadata.message_type, bytes_of(reply.content)
            algo = str(message.content.config_records.get("baseline", {"algo": "fedproto"})["algo"])
            names, _ = read_anew(algo, kind, text, METRICS)
            seen.setdefault(kind, set()).update(names)
            assert_no_local_paths(outcome, outcome.folder.parent.parent, text)
    assert {name.removesuffix(".default") for name in client_module.app._registered_funcs} == set(
        RECORDS
    )
    seen[MessageType.TRAIN] |= {name for row in CATALOG.values() for name in row.exchange.up}
    assert seen == RECORDS


@pytest.mark.parametrize("what", ["noise", "noise under masks"])
def test_under_differential_privacy_replies_tell_no_losses_and_no_classes(
    what: str, asked: dict[str, Outcome]
) -> None:
    for message, reply in asked[what].grid.log:
        names, arrays = read_anew(
            "fedproto", message.metadata.message_type, bytes_of(reply.content)
        )
        if names == {"site"}:
            assert list(reply.content.config_records["site"]["present"]) == (
                [] if "masks" in what else [*range(10)]
            )
        if "report" in names:
            assert not [
                name for name in reply.content.metric_records["report"] if name.startswith("losses")
            ]
        if "prototypes" in arrays:
            assert arrays["prototypes"]["counts"].sum() <= 40
        if message.metadata.message_type == MessageType.TRAIN:
            assert names == {
                "report",
                *(("masked", NEXT_SUM) if "masks" in what else ("prototypes",)),
            }
    accounts = list(asked[what].folder.parent.parent.glob("private-disk-*/privacy/*.json"))
    assert len(accounts) == 2 * CLIENTS  # of the client's name, and of its data
    for one in accounts:
        (spent,) = json.loads(one.read_text()).values()
        assert all(len(used) == 3 and isinstance(used[2], int) for used in spent)


def test_class_means_under_differential_privacy_are_not_the_true_ones(
    asked: dict[str, Outcome],
) -> None:
    """Nor near them: of 40 samples even a large ε leaves much noise. A few numbers may be equal by chance."""
    noisy = {}
    for what in ("nothing", "noise"):
        sent = [
            reply.content["prototypes"]
            for _, reply in asked[what].grid.log
            if "prototypes" in reply.content
        ]
        noisy[what] = np.concatenate([values_of(one["means"]).ravel() for one in sent])
    assert np.abs(noisy["noise"]).mean() > 0.1
    assert np.isin(noisy["noise"], noisy["nothing"][noisy["nothing"] != 0]).mean() < 0.001


SECRET = "cannot read 0.25 0.75 of tumour in /srv/scans/a.png"
SAID = {OSError: "an unexpected error", KeyError: "an unexpected error",
    DataError: "its data cannot be read or divided as the run asks",
    StateError: "its state (models, requests, counts) cannot be read or written",
    BackboneError: "a frozen backbone cannot be had"}  # fmt: skip


@pytest.mark.parametrize("kind", RECORDS)
def test_an_error_says_its_kind_and_nothing_of_the_data(
    kind: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Whatever fails in whatever part of a round, at a machine with an operator."""
    node = {
        "site-name": "north",
        "state-dir": str(tmp_path),
    }  # not the checkout's, whose refusals of a day are counted
    context = Context(1, 7, node, RecordDict(), run_config(tmp_path))
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 7
    for error, said in SAID.items():
        for module in (client_module, introduction, secure_sum, trained_model):
            monkeypatch.setattr(module, "Client", MagicMock(side_effect=error(SECRET)))
        reply = client_module.app(Message(RecordDict(), 7, kind, group_id="1"), context)
        called = "site north: " if kind == MessageType.QUERY else ""
        assert (
            reply.error.reason == f"{called}{error.__name__}: {said}; the log of the site says more"
        )


# -- small classes and noise -------------------------------------------------------------------------------------------
def unequal(
    folder: Path, algo: str, least: int, node: dict[str, Any] | None = None, **settings: Any
) -> Outcome:
    """Three clients with classes of one sample and of many."""
    data = {
        "dataset": "digits",
        "partition": "dirichlet",
        "alpha": 0.5,
        "total_samples": 150,
        "train_samples": 0,
    }
    data |= {
        "models": "mlp-1",
        "feature_dim": 16,
        "test_samples": 30,
        "rounds": 1,
        "fedgen__server_steps": 2,
    }
    data |= {"backbones": "glyphs"} if algo in ("fedpcl", "mpft", "gaussian") else {}
    config = run_config(folder, algo=algo, **data | {"min_class_samples": least} | settings)
    return run_federation(config, nodes=real_nodes(folder, **(node or {})))


@pytest.mark.parametrize(
    "algo", [algo for algo, one in DECLARED.items() if one.prototypes or one.label_counts]
)
def test_nothing_is_told_of_classes_with_few_samples(algo: str, tmp_path: Path) -> None:
    """Neither in introductions nor in uploads; clusters, too, are of so many samples. All else arrives."""
    least, kept = 6, 0
    outcome = unequal(tmp_path, algo, 2, {"min-class-samples": least})
    assert not any(outcome.summary["trouble"].values())
    for message, reply in outcome.grid.log:
        node = outcome.grid.nodes[message.metadata.dst_node_id]
        counts = np.bincount(
            client_of(outcome.grid.run_config, **node).data.train_labels, minlength=10
        )
        large = np.flatnonzero(counts >= least).tolist()
        assert (counts[counts < least] > 0).any()
        facts = RunFolder(outcome.folder).sites()["sites"][
            f"site-{message.metadata.dst_node_id - 1000}"
        ]
        assert (
            facts["train-samples"] == counts[counts >= least].sum()
        )  # or it would show how many are in small ones
        for item in recorddict_to_proto(reply.content).items:
            if item.key == "site":
                assert (
                    list(item.config_record.items[list(SITE).index("present")].value.sint_list.vals)
                    == large
                )
            if item.key in ("prototypes", "outputs"):
                arrays = arrays_anew(item.array_record)[1]
                assert sorted(set(arrays["labels"].tolist())) == large
                assert (arrays.get("counts", counts[arrays["labels"]]) >= least).all()
                assert (
                    np.bincount(arrays["labels"], minlength=10) <= counts // least
                ).all()  # of clusters
                kept += len(large)
            if item.key == "label_counts":
                told = arrays_anew(item.array_record)[1]["counts"]
                assert told.tolist() == np.where(counts >= least, counts, 0).tolist()
                kept += 1
    assert kept


def test_a_site_may_raise_the_least_number_and_never_lower_it(tmp_path: Path) -> None:
    """A client without a class of enough samples says so at once."""
    north = {"site-name": "north"}
    for more, run, least in (
        ({"min-class-samples": 5}, 1, 5),
        ({"min-class-samples": 5}, 9, 9),
        ({}, 3, 3),
    ):
        client = client_of(run_config(tmp_path, min_class_samples=run), **north | more)
        assert client.settings.privacy.min_class_samples == least
    with pytest.raises(
        SettingsError, match="node-config: min-class-samples = 'many' must be a whole number"
    ):
        client_of(run_config(tmp_path), **north, **{"min-class-samples": "many"})
    assert (
        client_of(run_config(tmp_path, min_class_samples=999), **north).stated_samples == 0
    )  # all are in small ones
    for algo in ("fedproto", "fedavg"):
        with pytest.raises(Exception, match="min-class-samples = 999: this client has no class"):
            unequal(tmp_path, algo, 999)


@pytest.mark.parametrize("least", [3, 25])
def test_recalls_of_classes_with_few_test_samples_do_not_leave(least: int, tmp_path: Path) -> None:
    """Fewer than 20, or than ``min-class-samples`` if that is more; those of more do."""
    sizes = {"total_samples": 1500, "test_samples": 240, "alpha": 0.3}
    outcome = unequal(tmp_path, "fedproto", least, metrics="recall,auc", **sizes)
    found = []
    for message, reply in outcome.grid.log[CLIENTS:]:
        node = outcome.grid.nodes[message.metadata.dst_node_id]
        tested = client_of(outcome.grid.run_config, **node).data.test_labels
        names = {name.rpartition("/")[2] for name in reply.content["report"] if "/recall/" in name}
        large = sorted(
            (counts := np.bincount(tested))[counts >= max(least, 20)]
        )  # all, or all but the smallest
        assert names == {str(label) for label in range(10) if (tested == label).sum() >= large[0]}
        assert ("metrics.head/auc" in reply.content["report"]) == (len(names) > 1)
        found += names
    assert found


@pytest.mark.parametrize("least", [2, 25])
def test_no_figure_of_few_samples_leaves_and_the_run_does_without(
    least: int, tmp_path: Path
) -> None:
    """With 20 of them where ``min-class-samples`` is less; test and validation samples each for themselves."""
    more = {
        "validation_fraction": 0.3,
        "metrics": "auc",
        "keep_best": True,
        "report": True,
        "rounds": 2,
    }
    outcome = unequal(
        tmp_path,
        "fedproto",
        least,
        total_samples=900,
        test_samples=19 if least == 2 else 24,
        **more,
    )
    assert not any(outcome.summary["trouble"].values())
    assert outcome.summary["accuracy"] == outcome.summary["metrics"] == {}
    seen = set()
    for _, reply in outcome.grid.log[CLIENTS:]:
        if "report" in reply.content:
            report = reply.content["report"]
            assert not [name for name in report if name.startswith(("correct", "metrics"))]
            seen.add(has := any(name.startswith("validation.") for name in report))
            assert has == (report["validation_samples"] >= max(least, 20))
    assert (outcome.folder / "report.html").exists()
    assert seen


def test_classes_are_told_at_joining_only_where_uploads_will_tell_them(tmp_path: Path) -> None:
    for algo, declared in DECLARED.items():
        site = client_of(small_config(tmp_path, algo), 1)
        held = sorted(set(site.data.train_labels.tolist()))
        assert len(held) == 5
        assert list(card_of(site, 1, "").present) == (held if declared.tells_classes else [])


def test_an_error_names_no_file_of_a_site_and_no_folder(
    tmp_path: Path, monkeypatch: Patch, capsys: Printed
) -> None:
    text = f"cannot open {tmp_path}/private-disk-0/scans/a.png, nor '{Path.home()}/my scans/b.png'"

    def reasons(folder: Path, **options: Any) -> set[str]:
        rows = rows_without_a_reply(small_config(folder, "local"), CLIENTS, **options)
        return {reason for row in rows for reason in row["failed"].values()}

    monkeypatch.setattr(ClientAlgorithm, "fit", MagicMock(side_effect=OSError(text)))
    told = "OSError: an unexpected error; the log of the site says more"
    assert reasons(tmp_path / "sites", nodes=real_nodes(tmp_path / "sites")) == {told}
    assert f"OSError: {text}" in capsys.readouterr().err
    assert reasons(tmp_path / "simulated") == {
        "OSError: cannot open …/a.png, nor '…/my scans/b.png'"
    }


# -- a client that sends more is found out -----------------------------------------------------------------------------

Pack = Callable[..., Any]


def packs(change: Callable[[Any], Any]) -> Callable[[Pack], Pack]:
    """What is packed honestly, changed in place."""

    def changed(honest: Pack, *args: Any) -> Any:
        change(record := honest(*args))
        return record

    return lambda honest: partial(changed, honest)


def more_bytes(content: RecordDict) -> None:
    means = content.array_records["prototypes"]["means"]
    content.array_records["prototypes"]["means"] = Array(
        "float32", means.shape, RAW, means.data + b"more"
    )


def sends_a_sample(honest: Pack) -> Pack:
    def local_prototypes(self: ClientAlgorithm[Any]) -> Prototypes:
        found: Prototypes = honest(self)
        sample = self.model.body(
            self.client.train_set.inputs[self.client.train_set.labels == found.labels[0]][:1]
        )
        return Prototypes(torch.cat([sample.detach(), found.means[1:]]), found.labels, found.counts)

    return local_prototypes


FEATURES = raw(np.zeros((30, 64), np.float32))
MORE: dict[str, tuple[Any, str, Callable[[Pack], Pack], str]] = {
    "a record": (client_module, "pack_payload",
        packs(lambda one: one.update({"features": ArrayRecord({"z": FEATURES})})), "bytes beyond the declared values"),
    "an array": (client_module, "pack_payload", packs(lambda one: one["prototypes"].update({"features": FEATURES})),
        "an undeclared array"),
    "bytes after an array": (client_module, "pack_payload", packs(more_bytes), "bytes beyond the shape"),
    "a text": (client_module, "pack_payload", packs(lambda one: one.update({"note": ConfigRecord({"from": "here"})})),
        "bytes beyond the declared values"),
    "a number": (records, "pack_report", packs(lambda one: one.update({"losses.first-feature": 0.25})),
        "an undeclared number losses.first-feature"),
    "a list in place of a number": (records, "pack_report", packs(lambda one: one.update({"train_samples": [10, 20]})),
        "not a single number"),
    "a path in the introduction": (records, "pack_site_card", packs(lambda one: one.update({"domain": "/srv/scans"})),
        "a path"),
    "a sample in place of a mean": (ClientAlgorithm, "local_prototypes", sends_a_sample, "of a single sample"),
}  # fmt: skip
UNSEEN = ("a path in the introduction", "a sample in place of a mean")
"""What the server cannot tell from an honest reply."""


@pytest.mark.parametrize("what", MORE)
def test_a_client_that_sends_more_is_found_out(
    what: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    """So the test above can see it. Where the server can, it refuses."""
    owner, name, change, said = MORE[what]
    monkeypatch.setattr(owner, name, change(getattr(owner, name)))
    grids: list[LocalGrid] = []
    run = run_federation if what in UNSEEN else rows_without_a_reply
    found = run(
        small_config(tmp_path, "fedproto"),
        CLIENTS,
        nodes=real_nodes(tmp_path),
        on_grid=grids.append,
    )
    with pytest.raises(AssertionError, match=said):
        assert_private(SimpleNamespace(grid=grids[0]), tmp_path, "fedproto")
    rows = found.rows if isinstance(found, Outcome) else found
    assert any(row["refused"] for row in rows) == (what not in UNSEEN)


def test_a_further_field_of_the_introduction_is_found_out(tmp_path: Path) -> None:
    card = pack_site_card(card_of(client_of(small_config(tmp_path, "local"), 1), 1, ""))
    honest, more = (
        RecordDict({"site": one}) for one in (card, ConfigRecord({**card, "counts": [10, 20]}))
    )
    assert_only_declared("local", MessageType.QUERY, 0, bytes_of(honest))
    with pytest.raises(AssertionError, match="an undeclared field"):
        assert_only_declared("local", MessageType.QUERY, 0, bytes_of(more))
    with pytest.raises(RefusedMessage, match="no complete record 'site'"):
        unpack_site_card(more)
