"""Whole federations on tables, signals and texts, with networks and data of the user's own."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from protofl_common.models.trained import TrainedModel
from protofl_common.tools.cli import main
from protofl_common.tools.inference import Predictor
from server_app.network.membership import FederationError
from server_app.strategies import fedavg
from tests.support.commands import output
from tests.support.given import Patch, Printed
from tests.support.harness import Outcome, client_of, refusal, run_config, run_federation

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
class Wrong(Tiny):
    def forward(self, x):
        return x
def number(input_shape, feature_dim):
    return 3
def fails(input_shape, feature_dim):
    raise RuntimeError("no such thing")
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: Patch) -> str:
    name = f"nets_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(NETS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


@pytest.fixture
def kinds(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Settings for each kind of data: waves in three frequencies and two channels, of three clients, and texts."""
    rng, words = np.random.default_rng(0), ("goal match team", "vote party law", "chip code web")
    rows = [
        f"{i % 3},{' '.join(rng.permutation(words[i % 3].split()))} of the day" for i in range(90)
    ]
    (texts := tmp_path / "texts.csv").write_text("label,text\n" + "\n".join(rows) + "\n")
    labels, waves = np.arange(300) % 3, tmp_path / "waves.npz"
    inputs = np.sin((labels[:, None, None] + 1) * np.linspace(0, 6, 20)) + rng.normal(
        0, 0.2, (300, 2, 20)
    )
    split = np.where(np.arange(300) % 4, "train", "test")
    np.savez(
        waves, inputs=inputs, labels=labels, client=np.repeat(["a", "b", "c"], 100), split=split
    )
    signal = {
        "dataset": "arrays",
        "models": "signal3",
        "partition": "natural",
        "test_from": "official-own",
    }
    text = {"dataset": "text-csv", "models": "text3", "partition": "iid", "text_length": 8}
    return {"image": {}, "table": {"dataset": "wine", "models": "table3", "partition": "iid"},
        "signal": signal | {"data_dir": str(waves)}, "text": text | {"data_dir": str(texts)}}  # fmt: skip


def accuracy(run: Outcome) -> float:
    return max(entry["weighted"] for entry in run.rows[-1]["accuracy"].values())


LEARN: dict[str, Any] = {
    "rounds": 4,
    "local_epochs": 3,
    "train_samples": 0,
    "optimizer": "adam",
    "lr": 0.005,
}


FEDPROTO = [("fedproto", kind) for kind in ("table", "signal", "text")]


@pytest.mark.parametrize(("algo", "kind"), [*FEDPROTO, ("local", "table"), ("fedtgp", "text")])
def test_unlike_networks_learn_all_kinds_of_data(
    tmp_path: Path, kinds: Any, kind: str, algo: str
) -> None:
    run = run_federation(run_config(tmp_path, algo=algo, **kinds[kind], **LEARN), clients=3)
    assert accuracy(run) > 0.6
    assert len({site["arch"] for site in run.summary["clients"].values()}) == 3


@pytest.mark.parametrize("kind", ["table", "signal", "text"])
def test_weights_are_averaged_exported_and_predict(
    tmp_path: Path, kinds: Any, kind: str, capsys: Printed
) -> None:
    config = run_config(tmp_path, algo="fedavg", **kinds[kind])
    run, out = run_federation(config, clients=3), tmp_path / "model"
    assert main(["export", str(run.folder), "--site", "site-1", "--out", str(out)]) == 0
    site = client_of(config, 1)
    found = Predictor.load(out).predict(site.data.test_inputs)
    right = np.mean(
        [one.label == label for one, label in zip(found, site.data.test_labels, strict=True)]
    )
    assert right == run.summary["accuracy-of-clients"]["site-1"]["head"]
    np.save(tmp_path / "x.npy", site.data.test_inputs)
    told = [
        json.loads(line)
        for line in output(capsys, "predict", out, tmp_path / "x.npy", "--json").out.splitlines()
    ]
    assert [one["label"] for one in told] == [one.label for one in found]
    np.save(tmp_path / "y.npy", np.zeros((1, 99)))
    assert (
        "a sample is [99]; the model takes"
        in output(capsys, "predict", out, tmp_path / "y.npy", status=1).err
    )


def test_rows_of_a_file_are_predicted_from_the_columns_of_the_run(
    tmp_path: Path, kinds: Any, capsys: Printed
) -> None:
    """In whatever order and among whatever others they stand."""
    file = Path(kinds["text"]["data_dir"])
    rows = [line.split(" ", 1) for line in file.read_text().splitlines()[1:]]
    file.write_text("\n".join(["label,title,body", *(f"{title},{body}" for title, body in rows)]))
    run = run_federation(run_config(tmp_path, algo="fedproto", **kinds["text"]), clients=1)
    console = capsys.readouterr().out
    assert "inputs: the columns title, body together" in console.splitlines()
    first = {
        kind: f"{kind} {100 * of['mean']:.1f}%" for kind, of in run.rows[1]["accuracy"].items()
    }
    assert all(
        f"{text} (worst {text.split()[1]})" in console for text in first.values()
    )  # of the only client
    assert main(["export", str(run.folder), "--out", str(tmp_path / "model")]) == 0
    told = []
    for head, line in (
        ("label,title,body", "{0},{1}"),
        ("id,body,title,label", "7,{1},{2},{3}"),
        ("body", "{1}"),
    ):
        values = [(title, body, *reversed(title.split(","))) for title, body in rows]
        (tmp_path / "new.csv").write_text(
            "\n".join([head, *(line.format(*each) for each in values)])
        )
        words = ("predict", tmp_path / "model", tmp_path / "new.csv", "--json")
        told.append(output(capsys, *words, status=head == "body"))
    assert len(told[0].out.splitlines()) == 90
    assert told[1].out == told[0].out
    assert "has no column 'title'; the model takes title, body" in told[2].err


@pytest.mark.parametrize(("algo", "kind", "arch"), [("fedproto", "signal", "signal-transformer"),
    ("local", "text", "text-gru"), ("fedplvm", "image", "resnet4-imagenet-stem")])  # fmt: skip
def test_onnx_computes_the_same(
    tmp_path: Path, kinds: Any, kind: str, arch: str, algo: str
) -> None:
    """For every type of input; with Euclidean distances from prototypes, without any, and with cosines."""
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    config = run_config(tmp_path, algo=algo, rounds=1, **kinds[kind] | {"models": arch})
    run, out = run_federation(config, clients=3), tmp_path / "model"
    assert main(["export", str(run.folder), "--site", "site-1", "--out", str(out), "--onnx"]) == 0
    inputs = np.asarray(client_of(config, 1).data.test_inputs[:5])
    given = inputs.astype(np.float32) if kind == "image" else inputs
    logits, *distances = runtime.InferenceSession(str(out / "model.onnx")).run(
        None, {"inputs": given}
    )
    wanted, distances_NP = Predictor.load(out).outputs(inputs)
    np.testing.assert_allclose(logits, wanted["head"], atol=1e-4)
    assert len(distances) == (distances_NP is not None) == (algo != "local")
    if distances_NP is not None:
        np.testing.assert_allclose(distances[0], distances_NP, atol=1e-4)


@pytest.fixture
def messy(tmp_path: Path) -> str:
    """A table of two hospitals with a name, a category and gaps; the label follows from the category and the age."""
    rng, rows = np.random.default_rng(0), ["name,sex,age,chol,client,split,label"]
    for i in range(120):
        sex, age, part = (
            "fm"[i % 2],
            rng.normal(40 + 20 * (i % 3 == 0)),
            "test" if i % 4 == 3 else "train",
        )
        label = ("well", "sick")[(sex == "f") ^ (i % 3 == 0)]
        rows.append(
            f"P{i},{sex},{age},{rng.normal(200) if i % 7 else ''},{('north', 'south')[i < 60]},{part},{label}"
        )
    (tmp_path / "messy.csv").write_text("\n".join(rows) + "\n")
    return str(tmp_path / "messy.csv")


def test_a_messy_table_is_learned_exported_and_predicted_from(
    tmp_path: Path, messy: str, capsys: Printed
) -> None:
    """The exported model reads the same columns, fills gaps as its site has, and so does its ONNX file."""
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    table = {
        "dataset": "arrays",
        "data_dir": messy,
        "drop": "name",
        "one_hot": "sex:f|m",
        "impute": "median",
    }
    table |= {"partition": "natural", "test_from": "official-own", "models": "mlp-1"}
    config = run_config(tmp_path, algo="fedavg", **table, **LEARN | {"rounds": 3, "batch_size": 8})
    run = run_federation(config, clients=2)
    assert accuracy(run) > 0.8
    out = tmp_path / "model"
    assert main(["export", str(run.folder), "--site", "site-0", "--out", str(out), "--onnx"]) == 0
    lines = Path(messy).read_text().splitlines()
    tested = [line for line in lines if ",north,test," in line]
    mixed = [
        ",".join(reversed(line.split(",")[1:])) for line in (lines[0], *tested)
    ]  # other order, without names
    (tmp_path / "new.csv").write_text("\n".join(mixed) + "\n")
    told = output(
        capsys, "predict", out, tmp_path / "new.csv", "--by", "head", "--json"
    ).out.splitlines()
    names = [json.loads(line)["name"] for line in told]
    right = np.mean([line.endswith(name) for line, name in zip(tested, names, strict=True)])
    assert right == run.summary["accuracy-of-clients"]["site-0"]["head"]
    raw = np.array([[1, 0, 50, np.nan]], np.float32)
    (logits,) = runtime.InferenceSession(str(out / "model.onnx")).run(None, {"inputs": raw})
    np.testing.assert_allclose(logits, Predictor.load(out).outputs(raw)[0]["head"], atol=1e-4)
    (tmp_path / "new.csv").write_text("age,chol\n1,2\n")
    assert main(["predict", str(out), str(tmp_path / "new.csv")]) == 1
    assert "has no column 'sex'; the model takes sex, age, chol" in capsys.readouterr().err


@pytest.mark.parametrize("algo", ["fedproto", "fedavg", "fedplvm"])
def test_a_network_of_the_users_own(tmp_path: Path, nets: str, algo: str) -> None:
    """One that calls a layer twice, as the fused step of the catalog's networks does not allow."""
    models = f"{nets}:Tiny,mlp-1" if algo == "fedproto" else f"{nets}:Tiny"
    config = run_config(
        tmp_path, algo=algo, dataset="wine", partition="iid", models=models, feature_dim=384
    )
    run = run_federation(config, clients=2)
    archs = [run.summary["clients"][f"site-{i}"]["arch"] for i in range(2)]
    assert archs == ([f"{nets}:Tiny", "mlp-1"] if algo == "fedproto" else [f"{nets}:Tiny"] * 2)
    again = run_federation(config | {"out-dir": str(tmp_path / "again")}, clients=2)
    assert [row["accuracy"] for row in again.rows] == [row["accuracy"] for row in run.rows]


def test_batch_normalisation_without_running_statistics_is_exported_as_it_is(
    tmp_path: Path, nets: str
) -> None:
    config = run_config(
        tmp_path, algo="fedavg", dataset="wine", partition="iid", models=f"{nets}:NoStatistics"
    )
    run = run_federation(config, clients=2)
    model = TrainedModel.read(run.folder / "clients" / "site-1" / "model.safetensors").build()
    assert isinstance(model.body.get_submodule("again"), nn.BatchNorm1d)


@pytest.mark.parametrize(("settings", "said"), [
    ({"batch_size": 1}, "batch-size = 1: batch normalisation cannot train on a batch of one sample; set norm"),
    ({"train_samples": 1}, "batch-size = 10: .* of one sample; set norm = 'group', or bring more samples"),
])  # fmt: skip
def test_a_batch_of_one_that_cannot_be_normalised_is_refused(
    tmp_path: Path, settings: Any, said: str
) -> None:
    small = {"algo": "fedpcl", "train_samples": 20, "batch_size": 10, "rounds": 1} | settings
    with pytest.raises(FederationError, match=said):
        run_federation(run_config(tmp_path, **small), clients=1)
    run_federation(run_config(tmp_path, **small, norm="group"), clients=1)


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
def test_what_does_not_fit_a_table_is_refused(
    algo: str, net: str, said: str, nets: str, tmp_path: Path
) -> None:
    """Networks and backbones, before the first round."""
    models = f"{nets}:{net}" if net else "small3"
    with pytest.raises(FederationError, match=said):
        run_federation(
            run_config(tmp_path, algo=algo, dataset="wine", partition="iid", models=models),
            clients=2,
        )


def test_the_server_builds_no_network_that_only_a_client_names(tmp_path: Path, nets: str) -> None:
    config = run_config(tmp_path, algo="fedavg", dataset="wine", partition="iid", models="mlp-1")
    nodes = {i: {"partition-id": i, "num-partitions": 2, "arch": f"{nets}:Tiny"} for i in range(2)}
    with pytest.raises(
        FederationError, match=r"has a network of its own, .*:Tiny; fedavg averages weights"
    ):
        run_federation(config, nodes=nodes)


def test_heads_are_averaged_over_networks_that_clients_name(
    tmp_path: Path, nets: str, monkeypatch: Patch
) -> None:
    shapes: list[tuple[int, ...]] = []
    build = fedavg.initial_model
    monkeypatch.setattr(
        fedavg, "initial_model", lambda arch, *rest: shapes.append(rest[0]) or build(arch, *rest)
    )
    config = run_config(tmp_path, algo="lg-fedavg", dataset="wine", partition="iid")
    archs = enumerate((f"{nets}:Tiny", "mlp-1"))
    nodes = {i: {"partition-id": i, "num-partitions": 2, "arch": arch} for i, arch in archs}
    assert [row["valid"] for row in run_federation(config, nodes=nodes).rows] == [2, 2, 2]
    assert set(shapes) == {()}, "the server builds no body"


@pytest.mark.parametrize(("key", "value", "said"), [
    ("models", "cnn4,cnn5", r"'cnn5': choose one of small3, .*, or MODULE:CLASS of your own .did you mean"),
    ("arch", "mynets.Tiny", "or MODULE:CLASS of your own"),
    ("arch", "a:b,c:d", "choose one of"),
    ("dataset", "mnst", "or MODULE:FUNCTION of your own .did you mean mnist"),
])  # fmt: skip
def test_settings_take_python_names_and_lists_and_nothing_else(
    key: str, value: str, said: str
) -> None:
    assert re.search(said, refusal({key: value}))
