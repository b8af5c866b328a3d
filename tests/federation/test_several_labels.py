"""Several labels a sample: read from each form of data, learned in simulation, or refused."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from protofl_common.config.options import SettingsError
from protofl_common.data import DataError, check_data_settings
from protofl_common.data.store import open_data
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.settings import Settings
from protofl_common.report.page import write_report
from protofl_common.tasks import MultiLabel
from protofl_common.tools.cli import main
from protofl_common.tools.inference import Predictor
from tests.support.harness import run_config, run_federation

NAMES = "Mass,Effusion,Cough"
ABLE = [name for name, row in CATALOG.items() if "multi-label" in row.tasks]


def several(samples: int = 240) -> tuple[np.ndarray, np.ndarray]:
    """Inputs [N, 6] and labels [N, 3]: a label holds where its direction is positive, mostly.

    A fifth of the labels is missing.
    """
    rng = np.random.default_rng(3)
    inputs = rng.normal(size=(samples, 6)).astype(np.float32)
    directions = rng.normal(size=(6, 3))
    labels = (inputs @ directions > [0.0, 1.0, 2.0]).astype(np.float64)
    labels[rng.random(labels.shape) < 0.2] = np.nan
    labels[np.isnan(labels).all(1), 0] = 0
    return inputs, labels


def config_of(tmp_path: Path, file: Path, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "task": "multi-label",
        "dataset": "arrays",
        "data_dir": str(file),
        "classes": NAMES,
        "partition": "iid",
        "models": "mlp-1",
        "train_samples": 0,
        "test_samples": 0,
        "rounds": 10,
        "lr": 0.1,
    }
    return run_config(tmp_path, **settings | changes)


def labels_in(tmp_path: Path, file: Path, **changes: Any) -> list[list[int]]:
    settings = Settings.from_run_config(config_of(tmp_path, file, **changes))
    return open_data(settings.data).labels.tolist()


def arrays_in(tmp_path: Path) -> Path:
    inputs, labels = several()
    np.savez(tmp_path / "findings.npz", inputs=inputs, labels=labels)
    return tmp_path / "findings.npz"


def table_in(tmp_path: Path, header: str, *rows: str) -> Path:
    file = tmp_path / f"{header}.csv"
    file.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return file


# -- learned
@pytest.mark.parametrize("algo", [name for name in ABLE if name != "gaussian"])
def test_several_labels_are_learned(algo: str, tmp_path: Path) -> None:
    outcome = run_federation(config_of(tmp_path, arrays_in(tmp_path), algo=algo), clients=3)
    areas = outcome.summary["metrics"]
    assert areas["head/auc"]["mean"] > 0.75
    if "prototype" in outcome.summary["accuracy"]:
        assert areas["prototype/auc"]["mean"] > 0.75


def test_a_label_that_a_client_never_annotated_is_learned_from_others(tmp_path: Path) -> None:
    """Two of three are annotated by each client, and the model knows all three."""
    config = config_of(
        tmp_path,
        arrays_in(tmp_path),
        algo="fedproto-avg",
        annotated_labels=2,
        metrics="label-auc",
    )
    outcome = run_federation(config, clients=3)
    by_label = outcome.rows[-1]["metrics"]
    for label in (1, 3, 5):
        assert by_label[f"head/label-auc/{label}"]["mean"] > 0.75


# -- data
def test_each_form_gives_the_same_labels_whatever_the_order(tmp_path: Path) -> None:
    wanted = [[1, 0, -1], [0, 1, 1], [0, 0, 0]]
    x = np.eye(3, 4)
    np.savez(
        tmp_path / "a.npz",
        inputs=x,
        labels=[[np.nan, 1, 0], [1, 0, 1], [0, 0, 0]],
        classes=["Cough", "Mass", "Effusion"],
    )
    assert labels_in(tmp_path, tmp_path / "a.npz") == wanted

    columns = table_in(tmp_path, "Cough,a,Tumour,Effusion", ",1,1,0", "1,2,0,1", "0,3,0,0")
    assert labels_in(tmp_path, columns, label_map="Tumour=Mass") == wanted

    # who names labels says of all that occur in the file whether they hold
    joined = table_in(tmp_path, "a,labels", "1,Mass", "2,Fluid|Cough", "3,No Finding")
    read = labels_in(tmp_path, joined, label_map="Fluid=Effusion")
    assert read == [[1, 0, 0], [0, 1, 1], [0, 0, 0]]


def test_a_label_without_a_column_is_not_known(tmp_path: Path) -> None:
    file = table_in(tmp_path, "a,Mass", "1,1", "2,0")
    assert labels_in(tmp_path, file) == [[1, -1, -1], [0, -1, -1]]
    file = table_in(tmp_path, "a,labels", "1,Mass|Cough", "2,No Finding")
    assert labels_in(tmp_path, file) == [[1, -1, 1], [0, -1, 0]]


@pytest.mark.parametrize(("uncertain", "read"), [("missing", -1), ("0", 0), ("1", 1)])
def test_uncertain_labels_are_what_the_setting_says(
    uncertain: str, read: int, tmp_path: Path
) -> None:
    file = table_in(tmp_path, "a,Mass,Effusion", "1,-1.0,1.0", "2,1.0,0.0")
    labels = labels_in(tmp_path, file, classes="Mass,Effusion", uncertain=uncertain)
    assert labels == [[read, 1], [1, 0]]


def test_images_are_listed_with_the_names_of_their_findings(tmp_path: Path) -> None:
    from PIL import Image

    with (tmp_path / "list.csv").open("w", newline="") as opened:
        rows = csv.writer(opened)
        rows.writerow(["file", "labels", "client"])
        for number, names in enumerate(["Mass|Cough", "No Finding", "Effusion"]):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{number}.png")
            rows.writerow([f"{number}.png", names, "ann"])
    read = labels_in(tmp_path, tmp_path / "list.csv", dataset="manifest")
    assert read == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]


@pytest.mark.parametrize(("header", "rows", "changes", "why"), [
    ("a,Mass,Effusion", ["1,1,0", "2,2,0"], {}, "line 3, label 'Mass': '2' is neither 1 nor 0"),
    ("a,Mass,Effusion", ["1,-1,0"], {}, "set uncertain where -1 means"),
    ("a,Mass,Mass", ["1,1,0"], {}, "several columns are called 'Mass'"),
    ("a,Mass,Tumour", ["1,1,0"], {"label_map": "Tumour=Mass"}, "all stand for the label 'Mass'"),
    ("a,b", ["1,1"], {}, "names no column; its columns: a, b"),
    ("a,Mass", ["1,", "2,1"], {}, "line 2: no label of it is known .1 of 2 samples."),
    ("a,Mass", ["1,1"], {"label_map": "Tumour=Mass"}, "the data have no column 'Tumour'"),
    ("a,Mass", ["1,1"], {"label_map": "Mass=Masses"}, "'Masses', which is none of classes"),
    ("a,Mass", ["1,1"], {"label_map": "Mass"}, "'Mass' must be NAME=LABEL"),
    ("a,Mass", ["1,1"], {"classes": "Mass,Mass"}, "must be different names"),
    ("a,Mass", ["1,1"], {"classes": ""}, "name the columns of labels in classes"),
    ("a,labels", ["1,Mass|Lump"], {}, "has the label 'Lump', which is none of Mass, Effusion"),
    ("a,labels", ["1,Mass", "2,"], {}, "write 'No Finding' where none of the labels holds"),
])  # fmt: skip
def test_bad_labels_are_named(
    header: str, rows: list[str], changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises((DataError, SettingsError), match=why):
        labels_in(tmp_path, table_in(tmp_path, header, *rows), **changes)


def test_hugging_face_lists_the_labels_of_each_sample(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    columns = {"a": [1.0, 2, 3], "labels": [[2], [], [0, 1]]}
    kinds = datasets.Features(
        {
            "a": datasets.Value("float32"),
            "labels": datasets.List(datasets.ClassLabel(names=["Mass", "Fluid", "Cough"])),
        }
    )
    datasets.Dataset.from_dict(columns, features=kinds).save_to_disk(tmp_path / "named")
    by_name = {"a": columns["a"], "labels": [["Cough"], [], ["Mass", "Fluid"]]}
    datasets.Dataset.from_dict(by_name).save_to_disk(tmp_path / "texts")
    for name in ("named", "texts"):
        read = labels_in(tmp_path, tmp_path, dataset=f"hf:{name}", label_map="Fluid=Effusion")
        assert read == [[0, 0, 1], [0, 0, 0], [1, 1, 0]]


# -- figures
def test_f1_is_at_thresholds_of_validation_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If these choose a threshold above all scores, no test sample is given the label."""
    monkeypatch.setattr(MultiLabel, "thresholds", lambda *_: np.full(3, 1e9))
    config = config_of(
        tmp_path,
        arrays_in(tmp_path),
        algo="fedavg",
        metrics="macro-f1",
        validation_fraction=0.3,
    )
    final = run_federation(config, clients=2).rows[-1]
    assert final["metrics"]["head/macro-f1"]["mean"] == 0
    assert final["validation"]["head/macro-f1"]["mean"] > 0.3


def test_a_label_that_nobody_tests_is_named(tmp_path: Path) -> None:
    inputs, labels = several()
    labels[:, 2] = 0
    np.savez(tmp_path / "two.npz", inputs=inputs, labels=labels)
    metrics = "label-auc,label-auc-error"
    config = config_of(tmp_path, tmp_path / "two.npz", algo="local", rounds=1, metrics=metrics)
    outcome = run_federation(config, clients=2)
    said = "no client can test the labels Cough: its test samples all have it, or all lack it"
    assert said in outcome.summary["warnings"]

    page = write_report(outcome.folder).read_text(encoding="utf-8")
    table = page[page.index("AUC of each label") :]
    errors = []
    for client in outcome.rows[-1]["clients"].values():
        errors.append(client["metrics"]["head/label-auc-error/1"])
    mean = outcome.summary["metrics"]["head/label-auc/1"]["mean"]
    half = 1.96 * np.sqrt(np.square(errors).sum()) / 2
    assert f"{mean - half:.3f} … {min(1, mean + half):.3f}" in table
    assert "nobody" in table


# -- later
@pytest.mark.parametrize(
    ("task", "head", "names", "known_before"),
    [
        ("multi-label", "lda", ["Mass", "Effusion", "Cough"], ["Effusion", "Mass"]),
        ("single-label", "qda", ["a", "b", "c"], ["a", "c"]),
    ],
)
def test_a_site_with_a_new_name_comes_later(
    task: str, head: str, names: list[str], known_before: list[str], tmp_path: Path
) -> None:
    """The head is that of one run of both, of which the first knew nothing of the new name."""
    inputs, _ = several()
    rng = np.random.default_rng(8)
    kept, lost = known_before
    less = [kept, "other"]
    files = {
        "first": (known_before, inputs[:120]),
        "later": (names, inputs[120:]),
        "less": (less, inputs),
    }
    for site, (known, of_site) in files.items():
        if task == "multi-label":
            labels = rng.integers(2, size=(len(of_site), len(known)))
        else:
            labels = np.array(known)[rng.integers(len(known), size=len(of_site))]
        np.savez(tmp_path / f"{site}.npz", inputs=of_site, labels=labels, classes=known)

    def run(folder: str, classes: list[str], *sites: str, start_from: str = "") -> Any:
        nodes = {}
        for number, site in enumerate(sites, 1):
            file = str(tmp_path / f"{site}.npz")
            nodes[number] = {"site-name": site, "dataset": "arrays", "data-dir": file}
        config = run_config(
            tmp_path / folder,
            task=task,
            dataset="arrays",
            classes=",".join(classes),
            partition="own",
            num_clients=len(sites),
            min_clients=len(sites),
            algo="gaussian",
            backbones="none",
            rounds=1,
            gaussian__head=head,
            gaussian__revocable=True,
            gaussian__start_from=start_from,
        )
        return run_federation(config, nodes=nodes).folder

    earlier = str(run("one", known_before, "first"))
    checkpoints = []
    later = run("two", names, "later", start_from=earlier)
    for folder in (later, run("both", names, "first", "later")):
        checkpoints.append(load_file(folder / "checkpoints" / "000001.safetensors"))
    found, wanted = checkpoints
    for name in ("shares", "first", "second"):
        torch.testing.assert_close(found[f"moments/{name}"], wanted[f"moments/{name}"])

    with pytest.raises(SettingsError, match=f"its classes are .*{lost}.*; this run lacks some"):
        run("three", less, "less", start_from=earlier)


# -- refused
@pytest.mark.parametrize("algo", [name for name in CATALOG if name not in ABLE])
def test_other_methods_refuse_it_by_name(algo: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=f"{algo} does not learn several labels a sample"):
        Settings.from_run_config(config_of(tmp_path, tmp_path, algo=algo))


@pytest.mark.parametrize(("setting", "why"), [
    ({"dp": "sample"}, "a sample of several labels adds to several classes"),
    ({"dataset": "digits", "classes": ""}, "dataset 'digits' is not of this kind"),
    ({"dataset": "text-csv"}, "dataset 'text-csv' is not of this kind"),
    ({"positive_rate": 0.5}, "hides labels of samples that have one each"),
    ({"metrics": "recall"}, "'recall' is not one of auc"),
    ({"baselines": "fedgen"}, "fedgen does not learn several labels"),
    ({"algo": "gaussian", "gaussian__head": "qda"}, "is of one label a sample; choose lda"),
    ({"algo": "fedplvm", "min_class_samples": 3}, "sends clusters of samples"),
    ({"task": "single-label", "annotated_labels": 2}, "only with several labels a sample"),
])  # fmt: skip
def test_what_does_not_go_with_it_says_so(
    setting: dict[str, Any], why: str, tmp_path: Path
) -> None:
    config = config_of(tmp_path, arrays_in(tmp_path), **{"algo": "fedproto", **setting})
    with pytest.raises((SettingsError, DataError), match=why):
        check_data_settings(Settings.from_run_config(config).data)


# -- afterwards
def test_an_exported_model_says_how_likely_each_label_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, arrays_in(tmp_path), algo="fedproto")
    outcome = run_federation(config, clients=3)
    assert main(["export", str(outcome.folder), "--site", "site-1", "--out", f"{tmp_path}/m"]) == 0
    inputs, labels = several()
    answers = Predictor.load(tmp_path / "m").predict(inputs, by="prototype")
    likely = np.array([list(answer.probabilities.values()) for answer in answers])
    assert list(answers[0].probabilities) == NAMES.split(",")
    assert np.mean((likely > 0.5) == (labels == 1), where=~np.isnan(labels)) > 0.75

    np.save(tmp_path / "new.npy", inputs[:2])
    assert main(["predict", f"{tmp_path}/m", f"{tmp_path}/new.npy", "--json"]) == 0
    assert '"probability of Effusion": ' in capsys.readouterr().out
    assert "3: Mass, Effusion, Cough" in (tmp_path / "m" / "README.md").read_text()
