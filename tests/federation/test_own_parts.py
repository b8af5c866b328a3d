"""Whole federations on tables, signals and texts, with networks and data of the user's own."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from protofl_common.models.trained import TrainedModel
from protofl_common.tools.inference import Predictor
from server_app.network.membership import FederationError
from server_app.strategies import base
from tests.support.commands import export_model, output
from tests.support.harness import (
    client_of,
    federate,
    refusal,
    run_config,
    run_federation,
)

NETS = """
import math
import torch
from torch import nn
class Tiny(nn.Module):
    def __init__(self, input_shape, feature_dim):
        super().__init__()
        self.layer = nn.Linear(math.prod(input_shape), feature_dim)
        self.again = nn.Linear(feature_dim, feature_dim)
    def forward(self, x):
        return torch.tanh(self.again(self.again(self.layer(x.flatten(1)))))
class NoStatistics(Tiny):
    def __init__(self, input_shape, feature_dim):
        super().__init__(input_shape, feature_dim)
        self.again = nn.BatchNorm1d(feature_dim, track_running_stats=False)
class Double(Tiny):
    def forward(self, x):
        return super().forward(x).double()
class Tied(Tiny):
    def __init__(self, input_shape, feature_dim):
        super().__init__(input_shape, feature_dim)
        self.twin = nn.Linear(feature_dim, feature_dim)
        self.twin.weight = self.again.weight
class Lazy(Tiny):
    def __init__(self, input_shape, feature_dim):
        super().__init__(input_shape, feature_dim)
        self.layer = nn.LazyLinear(feature_dim)
class Masked(Tiny):
    kind = torch.bool
    def __init__(self, input_shape, feature_dim):
        super().__init__(input_shape, feature_dim)
        self.register_buffer("mask", torch.ones(3, dtype=self.kind))
class Half(Masked):
    kind = torch.float16
class Complex(Masked):
    kind = torch.complex64
class Sparse(Tiny):
    def __init__(self, input_shape, feature_dim):
        super().__init__(input_shape, feature_dim)
        self.register_buffer("mask", torch.eye(3).to_sparse())
class Wrong(Tiny):
    def forward(self, x):
        return x
def number(input_shape, feature_dim):
    return 3
def fails(input_shape, feature_dim):
    raise RuntimeError("no such thing")
"""


@pytest.fixture
def nets(tmp_path, monkeypatch):
    """Write the module `NETS`, and return its name."""
    name = f"nets_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(NETS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


@pytest.fixture
def kinds(tmp_path):
    """Return kind of data -> the settings of a run on it, with small files of each.

    The texts are of three subjects; the signals are waves in three frequencies and two channels,
    of three clients.
    """
    rng = np.random.default_rng(0)
    words = ("goal match team", "vote party law", "chip code web")
    lines = ["label,text\n"]
    for i in range(90):
        text = " ".join(rng.permutation(words[i % 3].split()))
        lines.append(f"{i % 3},{text} of the day\n")
    texts = tmp_path / "texts.csv"
    texts.write_text("".join(lines))

    labels = np.arange(300) % 3
    frequencies = labels[:, None, None] + 1
    noise = rng.normal(0, 0.2, (300, 2, 20))
    waves = tmp_path / "waves.npz"
    np.savez(
        waves,
        inputs=np.sin(frequencies * np.linspace(0, 6, 20)) + noise,
        labels=labels,
        client=np.repeat(["a", "b", "c"], 100),
        split=np.where(np.arange(300) % 4, "train", "test"),
    )
    return {
        "image": {},
        "table": {"dataset": "wine", "models": "table3", "partition": "iid"},
        "signal": {
            "dataset": "arrays",
            "models": "signal3",
            "partition": "natural",
            "test_from": "official-own",
            "data_dir": str(waves),
        },
        "text": {
            "dataset": "text-csv",
            "models": "text3",
            "partition": "iid",
            "text_length": 8,
            "data_dir": str(texts),
        },
    }


def accuracy(run):
    """Return the better of the accuracies by head and by prototypes at the end of a run."""
    return max(figures["weighted"] for figures in run.rows[-1]["accuracy"].values())


LEARN = {
    "rounds": 4,
    "local_epochs": 3,
    "train_samples": 0,
    "optimizer": "adam",
    "lr": 0.005,
}


FEDPROTO = [("fedproto", kind) for kind in ("table", "signal", "text")]


@pytest.mark.parametrize(("algo", "kind"), [*FEDPROTO, ("local", "table"), ("fedtgp", "text")])
def test_unlike_networks_learn_all_kinds_of_data(tmp_path, kinds, kind, algo):
    """Three clients with networks of three kinds; of three classes guessing is right in a third."""
    run = federate(tmp_path, clients=3, algo=algo, **kinds[kind], **LEARN)
    assert accuracy(run) > 0.6
    assert len({site["arch"] for site in run.summary["clients"].values()}) == 3


@pytest.mark.parametrize("kind", ["table", "signal", "text"])
def test_weights_are_averaged_exported_and_predict(tmp_path, kinds, kind, capsys):
    """An exported model predicts as its client did, in Python and on the command line."""
    config = run_config(tmp_path, algo="fedavg", **kinds[kind])
    run = run_federation(config, clients=3)
    out = export_model(run.folder, tmp_path / "model", "site-1")

    data = client_of(config, partition=1).data
    labels = [prediction.label for prediction in Predictor.load(out).predict(data.test_inputs)]
    right = np.mean(np.equal(labels, data.test_labels))

    assert right == run.summary["accuracy-of-clients"]["site-1"]["head"]

    np.save(tmp_path / "x.npy", data.test_inputs)
    lines = output(capsys, "predict", out, tmp_path / "x.npy", "--json").out.splitlines()

    assert [json.loads(line)["label"] for line in lines] == labels


def test_rows_of_a_file_are_predicted_from_the_columns_of_the_run(tmp_path, kinds, capsys):
    """The run's columns may stand in any order and among other columns."""
    file = Path(kinds["text"]["data_dir"])
    rows = []
    _head, *lines = file.read_text().splitlines()
    for line in lines:
        start, body = line.split(" ", 1)
        label, title = start.split(",")
        rows.append({"label": label, "title": title, "body": body})
    write_table(file, ["label", "title", "body"], rows)

    run = federate(tmp_path, clients=1, algo="fedproto", **kinds["text"])

    console = capsys.readouterr().out
    assert "inputs: the columns title, body together" in console.splitlines()

    _first, second, _final = run.rows  # the first round has no prototypes to predict with
    for kind, figures in second["accuracy"].items():
        percent = f"{100 * figures['mean']:.1f}%"
        assert f"{kind} {percent} (worst {percent})" in console  # of the only client

    model = export_model(run.folder, tmp_path / "model")

    new = tmp_path / "new.csv"
    write_table(new, ["label", "title", "body"], rows)
    same_order = output(capsys, "predict", model, new, "--json").out

    assert len(same_order.splitlines()) == len(rows)

    write_table(new, ["id", "body", "title", "label"], [{"id": "7", **row} for row in rows])
    assert output(capsys, "predict", model, new, "--json").out == same_order

    write_table(new, ["body"], rows)
    error = output(capsys, "predict", model, new, "--json", status=1).err

    assert "has no column 'title'; the model takes title, body" in error


def write_table(file, columns, rows):
    lines = [",".join(columns)]
    for row in rows:
        lines.append(",".join(row[column] for column in columns))
    file.write_text("\n".join(lines))


@pytest.mark.parametrize(
    ("algo", "kind", "arch"),
    [
        ("fedproto", "signal", "signal-transformer"),  # Euclidean distances from prototypes
        ("local", "text", "text-gru"),  # no distances
        ("fedplvm", "image", "resnet4-imagenet-stem"),  # cosines
    ],
)
def test_onnx_computes_the_same(tmp_path, kinds, kind, arch, algo):
    """An exported ONNX file gives the model's logits and distances, for each type of input."""
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    config = run_config(tmp_path, algo=algo, rounds=1, **kinds[kind] | {"models": arch})
    run = run_federation(config, clients=3)
    out = export_model(run.folder, tmp_path / "model", "site-1", "--onnx")

    inputs = np.asarray(client_of(config, partition=1).data.test_inputs[:5])
    given = inputs.astype(np.float32) if kind == "image" else inputs  # pixels are whole numbers
    session = runtime.InferenceSession(str(out / "model.onnx"))
    logits, *distances = session.run(None, {"inputs": given})

    wanted, distances_NP = Predictor.load(out).outputs(inputs)
    np.testing.assert_allclose(logits, wanted["head"], atol=1e-4)
    if algo == "local":
        assert distances_NP is None
        assert distances == []
    else:
        (found_NP,) = distances
        np.testing.assert_allclose(found_NP, distances_NP, atol=1e-4)


@pytest.fixture
def messy(tmp_path):
    """Write a table of two hospitals with a name, a category and gaps, and return the file.

    The label follows from the category and the age.
    """
    rng = np.random.default_rng(0)
    lines = ["name,sex,age,chol,client,split,label\n"]
    for i in range(120):
        sex = "fm"[i % 2]
        is_old = i % 3 == 0
        age = rng.normal(60 if is_old else 40)
        chol = rng.normal(200) if i % 7 else ""
        client = "south" if i < 60 else "north"
        split = "test" if i % 4 == 3 else "train"
        label = "sick" if (sex == "f") != is_old else "well"
        lines.append(f"P{i},{sex},{age},{chol},{client},{split},{label}\n")
    file = tmp_path / "messy.csv"
    file.write_text("".join(lines))
    return str(file)


def test_a_messy_table_is_learned_exported_and_predicted_from(tmp_path, messy, capsys):
    """The exported model and its ONNX file read the same columns, and fill gaps as its site has."""
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    table = {
        "dataset": "arrays",
        "data_dir": messy,
        "drop": "name",
        "one_hot": "sex:f|m",
        "impute": "median",
        "partition": "natural",
        "test_from": "official-own",
        "models": "mlp-1",
    }
    config = run_config(tmp_path, algo="fedavg", **table, **LEARN | {"rounds": 3, "batch_size": 8})
    run = run_federation(config, clients=2)

    assert accuracy(run) > 0.8

    out = export_model(run.folder, tmp_path / "model", "site-0", "--onnx")

    head, *lines = Path(messy).read_text().splitlines()
    tested = [line for line in lines if ",north,test," in line]
    # the same columns in another order, and without that of names
    other_order = []
    for line in (head, *tested):
        _name, *cells = line.split(",")
        other_order.append(",".join(reversed(cells)))
    new = tmp_path / "new.csv"
    new.write_text("\n".join(other_order) + "\n")
    printed = output(capsys, "predict", out, new, "--by", "head", "--json").out
    right = 0
    for row, line in zip(printed.splitlines(), tested, strict=True):
        right += line.endswith(json.loads(row)["name"])  # the label is the last cell

    assert right / len(tested) == run.summary["accuracy-of-clients"]["site-0"]["head"]

    raw = np.array([[1, 0, 50, np.nan]], np.float32)  # f, m, age, chol: with a gap
    (logits,) = runtime.InferenceSession(str(out / "model.onnx")).run(None, {"inputs": raw})

    wanted, _distances = Predictor.load(out).outputs(raw)
    np.testing.assert_allclose(logits, wanted["head"], atol=1e-4)

    new.write_text("age,chol\n1,2\n")
    error = output(capsys, "predict", out, new, status=1).err

    assert "has no column 'sex'; the model takes sex, age, chol" in error


WINE = {"dataset": "wine", "partition": "iid"}


@pytest.mark.parametrize("algo", ["fedproto", "fedavg", "fedplvm"])
def test_a_network_of_the_users_own(tmp_path, nets, algo):
    """It is trained, and a run with it repeats; one client may have another network.

    It calls a layer twice, which the fused step of the catalog's networks does not allow.
    """
    own = f"{nets}:Tiny"
    models = [own, "mlp-1"] if algo == "fedproto" else [own]
    config = run_config(tmp_path, algo=algo, models=",".join(models), feature_dim=384, **WINE)
    run = run_federation(config, clients=2)
    again = run_federation(config | {"out-dir": str(tmp_path / "again")}, clients=2)

    clients = run.summary["clients"]
    assert clients["site-0"]["arch"] == own
    assert clients["site-1"]["arch"] == models[-1]
    assert again.per_row("accuracy") == run.per_row("accuracy")


@pytest.mark.parametrize("net", ["Tied", "Lazy"])
@pytest.mark.parametrize("algo", ["fedavg", "fedproto", "scaffold"])
def test_tied_weights_and_layers_built_late_are_trained_and_exported(tmp_path, nets, algo, net):
    """Two layers of `Tied` have one weight, also once exported; `Lazy` builds a layer when used."""
    run = federate(tmp_path, clients=2, algo=algo, models=f"{nets}:{net}", **WINE)
    model = TrainedModel.read(run.folder / "clients" / "site-1" / "model.safetensors").build()

    if net == "Tied":
        assert model.body.twin.weight is model.body.again.weight
    assert run.per_row("valid") == [2] * len(run.rows)


@pytest.mark.parametrize(("net", "kind"), [
    ("Masked", "bool"), ("Half", "float16"), ("Complex", "complex64"),
])  # fmt: skip
def test_a_type_that_does_not_travel_is_named_before_the_first_round(tmp_path, nets, net, kind):
    """Only methods that send weights name it; others may have such buffers."""
    settings = {"models": f"{nets}:{net}", **WINE}
    with pytest.raises(FederationError, match=rf"body\.mask is {kind}, and weights travel as"):
        federate(tmp_path, clients=2, algo="fedavg", **settings)

    run = federate(tmp_path / "fedproto", clients=2, algo="fedproto", **settings)
    assert list(run.folder.glob("clients/*/model.safetensors"))

    settings["models"] = f"{nets}:Sparse"
    with pytest.raises(FederationError, match="its model cannot be written"):
        federate(tmp_path / "sparse", clients=2, algo="fedproto", **settings)


def test_batch_normalisation_without_running_statistics_is_exported_as_it_is(tmp_path, nets):
    run = federate(tmp_path, clients=2, algo="fedavg", models=f"{nets}:NoStatistics", **WINE)
    model = TrainedModel.read(run.folder / "clients" / "site-1" / "model.safetensors").build()

    assert isinstance(model.body.get_submodule("again"), nn.BatchNorm1d)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"batch_size": 1},
            "batch-size = 1: batch normalisation cannot train on a batch of one sample; set norm",
        ),
        (
            {"train_samples": 1},
            "batch-size = 10: .* of one sample; set norm = 'group', or bring more samples",
        ),
    ],
)
def test_a_batch_of_one_that_cannot_be_normalised_is_refused(tmp_path, settings, said):
    """With norm = 'group', which normalises each sample by itself, it is accepted."""
    small = {"algo": "fedpcl", "train_samples": 20, "batch_size": 10, "rounds": 1} | settings
    with pytest.raises(FederationError, match=said):
        federate(tmp_path, clients=1, **small)
    federate(tmp_path, clients=1, **small, norm="group")


IMAGES = r"they see images, .* these data is float32 \[13\]; choose backbones ="


@pytest.mark.parametrize(("algo", "net", "said"), [
    ("fedproto", "Absent", "has no Absent"),
    ("fedproto", "number", "it returned int, not an nn.Module"),
    ("fedproto", "fails", r"it failed \(RuntimeError: no such thing\)"),
    ("fedproto", "Wrong", r"become float32 \[2, 13\], not float32 \[B, feature-dim\] = \[2, 64\]"),
    ("fedproto", "Double", r"become float64 \[2, 64\], not float32 \[B, feature-dim\] = \[2, 64\]"),
    ("fedpcl", "", IMAGES),
    ("mpft", "", IMAGES),
])  # fmt: skip
def test_what_does_not_fit_a_table_is_refused(algo, net, said, nets, tmp_path):
    """A network of the user's that fails, and backbones for images, are refused before round 1."""
    models = f"{nets}:{net}" if net else "small3"
    with pytest.raises(FederationError, match=said):
        federate(tmp_path, clients=2, algo=algo, models=models, **WINE)


def test_the_server_builds_no_network_that_only_a_client_names(tmp_path, nets):
    """Clients name a network that the run does not: FedAvg, whose server must build it, refuses."""
    config = run_config(tmp_path, algo="fedavg", models="mlp-1", **WINE)
    nodes = {i: {"partition-id": i, "num-partitions": 2, "arch": f"{nets}:Tiny"} for i in range(2)}
    said = r"has a network of its own, .*:Tiny; fedavg averages weights"

    with pytest.raises(FederationError, match=said):
        run_federation(config, nodes=nodes)


def test_heads_are_averaged_over_networks_that_clients_name(tmp_path, nets, monkeypatch):
    """LG-FedAvg averages heads, so the server builds a model without a body, of input shape ()."""
    shapes = []
    build = base.initial_model

    def noting(arch, shape, *rest):
        shapes.append(shape)
        return build(arch, shape, *rest)

    monkeypatch.setattr(base, "initial_model", noting)
    nodes = {
        0: {"partition-id": 0, "num-partitions": 2, "arch": f"{nets}:Tiny"},
        1: {"partition-id": 1, "num-partitions": 2, "arch": "mlp-1"},
    }
    outcome = federate(tmp_path, nodes=nodes, algo="lg-fedavg", **WINE)

    assert outcome.per_row("valid") == [2, 2, 2]
    assert set(shapes) == {()}, "the server builds no body"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (
            "models",
            "cnn4,cnn5",
            r"'cnn5': choose one of small3, .*, or MODULE:CLASS of your own .did you mean",
        ),
        ("arch", "mynets.Tiny", "or MODULE:CLASS of your own"),
        ("arch", "a:b,c:d", "choose one of"),
        ("dataset", "mnst", "or MODULE:FUNCTION of your own .did you mean mnist"),
    ],
)
def test_settings_take_python_names_and_lists_and_nothing_else(key, value, said):
    assert re.search(said, refusal({key: value}))
