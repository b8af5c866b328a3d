"""Several labels a sample: read from each form of data, learned in simulation, or refused."""

import csv
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from protofl_common.config.options import SettingsError
from protofl_common.data import DataError, check_data_settings
from protofl_common.data.objects import as_arrays, joined_frames
from protofl_common.data.store import open_data
from protofl_common.experiment.catalog import CATALOG
from protofl_common.experiment.settings import Settings
from protofl_common.report.page import write_report
from protofl_common.runs.figures import final_table, sentence
from protofl_common.runs.folder import RunFolder
from protofl_common.tasks import MultiLabel
from protofl_common.tools.inference import Predictor
from tests.support.commands import export_model, json_printed, output
from tests.support.harness import run_config, run_federation

NAMES = "Mass,Effusion,Cough"
ABLE = [name for name, row in CATALOG.items() if "multi-label" in row.tasks]


def several(samples=240):
    """Return inputs [N, 6] and labels [N, 3], 1 or 0, or NaN where one is missing.

    A label holds where the input goes far enough in its direction: the three hold more and more
    rarely. A fifth of the labels is missing, but no sample lacks all.
    """
    rng = np.random.default_rng(3)
    inputs = rng.normal(size=(samples, 6)).astype(np.float32)
    directions = rng.normal(size=(6, 3))
    labels = (inputs @ directions > [0.0, 1.0, 2.0]).astype(np.float64)
    labels[rng.random(labels.shape) < 0.2] = np.nan
    lacks_all = np.isnan(labels).all(1)
    labels[lacks_all, 0] = 0
    return inputs, labels


def config_of(tmp_path, file, **changes):
    """Return the settings of a run that learns several labels a sample from a file."""
    settings = {
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


def labels_in(tmp_path, file, **changes):
    """Return the labels of each sample that are read from a file, −1 where one is not known."""
    settings = Settings.from_run_config(config_of(tmp_path, file, **changes))
    return open_data(settings.data).labels.tolist()


def arrays_in(tmp_path):
    inputs, labels = several()
    np.savez(tmp_path / "findings.npz", inputs=inputs, labels=labels)
    return tmp_path / "findings.npz"


def table_in(tmp_path, header, *rows):
    """Write a CSV file, and return it."""
    file = tmp_path / f"{header}.csv"
    file.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return file


# -- learned
@pytest.mark.parametrize("algo", [name for name in ABLE if name != "gaussian"])
def test_several_labels_are_learned(algo, tmp_path):
    """The labels' mean AUC, of which guessing has 0.5, is above 0.75 by each way to predict."""
    outcome = run_federation(config_of(tmp_path, arrays_in(tmp_path), algo=algo), clients=3)
    areas = outcome.summary["metrics"]
    assert areas["head/auc"]["mean"] > 0.75
    if "prototype" in outcome.summary["accuracy"]:
        assert areas["prototype/auc"]["mean"] > 0.75


def test_a_label_that_a_client_never_annotated_is_learned_from_others(tmp_path):
    """Each client annotates two of three labels (annotated-labels), and the model knows all three.

    A metric names label l by the number 2 l + 1 of "label l holds" (2 l is "it does not hold").
    """
    config = config_of(
        tmp_path,
        arrays_in(tmp_path),
        algo="fedproto-avg",
        annotated_labels=2,
        metrics="label-auc",
    )
    outcome = run_federation(config, clients=3)
    by_label = outcome.rows[-1]["metrics"]
    for label in range(3):
        assert by_label[f"head/label-auc/{2 * label + 1}"]["mean"] > 0.75


# -- data
def test_each_form_gives_the_same_labels_whatever_the_order(tmp_path):
    """Three samples as arrays, as a table with a column for each label, and with one for all.

    Labels come in the order of the setting classes: Mass, Effusion, Cough.
    """
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

    # a list of names says of every label that occurs in the file whether it holds: none is unknown
    joined = table_in(tmp_path, "a,labels", "1,Mass", "2,Fluid|Cough", "3,No Finding")
    read = labels_in(tmp_path, joined, label_map="Fluid=Effusion")
    assert read == [[1, 0, 0], [0, 1, 1], [0, 0, 0]]


def test_a_label_without_a_column_is_not_known(tmp_path):
    """Nor is one that occurs in no list of names."""
    columns = table_in(tmp_path, "a,Mass", "1,1", "2,0")
    assert labels_in(tmp_path, columns) == [[1, -1, -1], [0, -1, -1]]
    lists = table_in(tmp_path, "a,labels", "1,Mass|Cough", "2,No Finding")
    assert labels_in(tmp_path, lists) == [[1, -1, 1], [0, -1, 0]]


@pytest.mark.parametrize(("uncertain", "read"), [("missing", -1), ("0", 0), ("1", 1)])
def test_uncertain_labels_are_what_the_setting_says(uncertain, read, tmp_path):
    file = table_in(tmp_path, "a,Mass,Effusion", "1,-1.0,1.0", "2,1.0,0.0")
    labels = labels_in(tmp_path, file, classes="Mass,Effusion", uncertain=uncertain)
    assert labels == [[read, 1], [1, 0]]


def test_images_are_listed_with_the_names_of_their_findings(tmp_path):
    """A list of image files has a column ``labels`` with names, joined by ``|``."""
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
    ("mass,Cough", ["1,1"], {}, 'label .Mass.; drop it, or set label-map="mass=Mass" if it has'),
    ("Lump,lump_", ["1,1"], {"label_map": "Lump=Mass"}, 'label .Lump.; .* label-map="lump_=Mass"'),
    ("a,client", ["1,1"], {"label_map": "client=Mass"}, 'set label-map="NEW NAME=Mass"'),
    ("a,Mass", ["1,1"], {"label_map": "Mass=Masses"}, "'Masses', which is none of classes"),
    ("a,Mass", ["1,1"], {"label_map": "Mass"}, "'Mass' must be NAME=LABEL"),
    ("a,Mass", ["1,1"], {"classes": "Mass,Mass"}, "must be different names"),
    ("a,Mass", ["1,1"], {"classes": ""}, "name the columns of labels in classes"),
    ("a,labels", ["1,Mass|Lump"], {}, "has the label 'Lump', which is none of Mass, Effusion"),
    ("a,labels", ["1,Mass", "2,"], {}, "write 'No Finding' where none of the labels holds"),
    ("a,labels", ["1,Mass;Lump", "2,Mass", "3,Lump"], {"classes": ""}, "'Mass;Lump' joins other"),
    ("a,labels", ["1,Mass", "2,mass", "3,Lump"], {"classes": ""}, "is also written in other"),
    ("a,labels", ["1,Mass|no finding", "2,Lump"], {"classes": ""}, "line 2 has .*: a finding, and"),
    ("a,Mass,effusion", ["1,1,0"], {}, 'label .Effusion.; drop it, or set label-map="effusion=Eff'),
    ("a,Mass,effusion", ["1,1,0"], {"columns": "a"}, "'effusion' would be left out, and is called"),
    ("a,Mass,E_ffusion", ["1,1,0"], {}, "'E_ffusion' would be an input, and is called as"),
    ("a,labels", ["1,Mass", "2,mass|Lump"], {}, 'label-map="Lump=,mass=Mass" reads those of other'),
    ("a,labels", ['1,"Mass,Cough"'], {}, "separate the names of several labels by [|]"),
    ("a,labels", ['1,"a, b"', "2,Mass"], {}, """label-map=' "a, b="' leaves out all that are"""),
    ("a,labels", ["1,No Finding"], {}, "no sample has a label of Mass, Effusion, Cough"),
    ("a,split", ["1,1"], {"classes": "split,Mass"}, "'split' would be a label, and the split of"),
])  # fmt: skip
def test_bad_labels_are_named(header, rows, changes, why, tmp_path):
    with pytest.raises((DataError, SettingsError), match=why):
        labels_in(tmp_path, table_in(tmp_path, header, *rows), **changes)


def test_a_column_that_is_neither_label_nor_input_is_named(tmp_path, capsys):
    """What the user drops is not: its owner knows of it. Doctor and site check name the inputs."""
    table = table_in(tmp_path, "a,b,c,Mass,Hernia", "1,2,3,1,0", "2,3,4,0,1")
    chosen = {"columns": "a,b", "drop": "b", "label_map": "Hernia="}
    labels_in(tmp_path, table, **chosen)
    assert "left out the columns c, Hernia\n" in capsys.readouterr().err

    words = ["task=multi-label", "dataset=arrays", f"data-dir={table}", f"classes={NAMES}"]
    cache = f"cache-dir={tmp_path / 'other'}"
    said = output(capsys, "doctor", *words, cache, "partition=iid", "models=mlp-1", status=1).out
    assert "inputs: the columns a, b, c, Hernia\n" in said

    from PIL import Image

    Image.new("RGB", (8, 8)).save(tmp_path / "x.png")
    images = table_in(tmp_path, "file,client,Mass,Fluid,Age", "x.png,ann,1,0,70")
    labels_in(tmp_path, images, dataset="manifest", label_map="Fluid=")
    assert "left out the columns Fluid, Age\n" in capsys.readouterr().err


@pytest.mark.parametrize("drop", ["", "Mass"])
def test_an_input_that_copies_a_label_is_named(drop, tmp_path, capsys):
    """An input with the label's name is refused, one with the label's values is named.

    Beside a column of names, ``labels``, a column for a single label would be an input.
    """
    joined = table_in(
        tmp_path, "a,labels,Mass,seen", "1,Mass,1,2", "5,No Finding,0,4", "5,Mass,1,2"
    )
    if not drop:
        with pytest.raises(DataError, match="'Mass' would be an input, and is called as the label"):
            labels_in(tmp_path, joined)
        return
    labels_in(tmp_path, joined, drop=drop)
    assert "column 'seen' says the label 'Mass' in other words" in capsys.readouterr().err


def test_the_columns_of_a_data_frame_name_the_labels():
    """They may come beside the inputs, as a data frame of their own, in any order."""
    pandas = pytest.importorskip("pandas")
    labels = pandas.DataFrame({"Cough": [1, 0], "Mass": [0, 1]})
    arrays = as_arrays((np.eye(2), labels))
    assert arrays["classes"] == ["Cough", "Mass"]

    inputs = pandas.DataFrame({"a": [1.0, 2.0]})
    assert list(joined_frames(inputs, labels).columns) == ["a", "Cough", "Mass"]
    assert list(joined_frames(inputs, labels[["Mass"]])["label"]) == [0, 1]
    with pytest.raises(DataError, match="inputs and labels both have the columns a"):
        joined_frames(inputs, labels.rename(columns={"Mass": "a"}))
    numbered = pandas.DataFrame(np.eye(2))  # columns 0 and 1, which become texts
    with pytest.raises(DataError, match="inputs and labels both have the columns 0"):
        joined_frames(inputs.rename(columns={"a": "0"}), numbered)
    with pytest.raises(DataError, match="1 labels; there are 2 inputs"):
        joined_frames(inputs, labels[:1])

    other_order = labels[["Mass", "Cough"]]
    with pytest.raises(DataError, match="y_train has the columns Cough, Mass; y_test has Mass, Co"):
        as_arrays((np.eye(2), labels, np.eye(2), other_order))


def test_hugging_face_lists_the_labels_of_each_sample(tmp_path):
    """A column of lists, of numbers of named classes or of names."""
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
        labels = labels_in(tmp_path, tmp_path, dataset=f"hf:{name}", label_map="Fluid=Effusion")
        assert labels == [[0, 0, 1], [0, 0, 0], [1, 1, 0]]  # of Mass, Effusion and Cough

    by_name["labels"][1] = None
    datasets.Dataset.from_dict(by_name).save_to_disk(tmp_path / "gap")
    with pytest.raises(DataError, match="sample 1 has the labels None; write 'No Finding'"):
        labels_in(tmp_path, tmp_path, dataset="hf:gap")


# -- figures
def test_f1_is_at_thresholds_of_validation_data(tmp_path, monkeypatch):
    """Here the thresholds are above all scores, so no test sample is given a label: F1 is 0.

    F1 on the validation data themselves needs none.
    """
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


def test_a_label_that_nobody_tests_is_named(tmp_path):
    """No sample has the third label, Cough: the run warns, and the report's table says so.

    The other labels have the interval of a mean over two clients, ± 1.96 standard errors.
    """
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
    error_of_mean = np.sqrt(np.square(errors).sum()) / 2
    reach = 1.96 * error_of_mean
    assert f"{mean - reach:.3f} … {min(1, mean + reach):.3f}" in table
    assert "nobody" in table


def test_the_auc_is_what_a_reader_sees_first(tmp_path, capsys, monkeypatch):
    """Exact match stands below it. A label's figure has its name beside the number."""
    monkeypatch.setenv("COLUMNS", "300")
    config = config_of(
        tmp_path, arrays_in(tmp_path), algo="fedproto", rounds=2, metrics="label-auc"
    )
    outcome = run_federation(config, clients=3)
    mean = outcome.summary["metrics"]["head/auc"]["mean"]
    classes = RunFolder(outcome.folder).sites()["classes"]

    assert re.search(
        "round 1/2  loss 0.[0-9]+  head/auc 0.", (outcome.folder / "run.log").read_text()
    )
    names = [row[0] for row in final_table(outcome.summary, classes).rows]
    assert names[:4] == [
        "prototype/auc",
        "head/auc",
        "prototype (exact match)",
        "head (exact match)",
    ]
    assert "head/label-auc/3 (Effusion)" in names
    assert sentence([outcome.summary]).startswith(f"FedProto AUC {mean:.3f} by its head")

    assert f"{mean:.4f}" in output(capsys, "compare", outcome.folder).out
    (group,) = json_printed(capsys, "compare", str(outcome.folder))["groups"]
    assert (group["figure"], group["mean"]) == ("final head/auc", mean)
    compared = output(capsys, "compare", outcome.folder, "--what", "head/label-auc/3").out
    assert "final head/label-auc/3 (Effusion)" in " ".join(compared.split())

    page = write_report(outcome.folder).read_text(encoding="utf-8")
    assert page.index(f"<b>{mean:.3f}</b><span>mean AUC by each model") < page.index("exact match")


def test_without_an_auc_the_result_is_exact_match_and_says_how_to_get_one(tmp_path):
    """Secure aggregation measures what is asked for alone."""
    config = config_of(tmp_path, arrays_in(tmp_path), algo="fedproto", rounds=2, secagg=True)
    outcome = run_federation(config, clients=3)
    table = final_table(outcome.summary)
    assert {row[0] for row in table.rows} == {"prototype (exact match)", "head (exact match)"}
    assert "the AUC tells more: metrics=auc has it measured" in table.note
    assert sentence([outcome.summary]).startswith("FedProto exact match ")


def test_predictions_of_a_run_name_the_labels(tmp_path, capsys):
    """A label that nobody knows has no prototypes, so nothing is said of it by these.

    Figures that need one label a sample are refused before anything is written.
    """
    inputs, labels = several()
    labels[:, 2] = np.nan  # Cough
    labels[np.isnan(labels).all(1), 0] = 0
    np.savez(tmp_path / "two.npz", inputs=inputs, labels=labels)
    config = config_of(tmp_path, tmp_path / "two.npz", algo="fedproto", rounds=2)
    folder = run_federation(config, clients=2).folder
    warned = "no client has training samples of: no Cough, Cough"
    assert warned in (folder / "run.log").read_text(encoding="utf-8")

    refused = output(capsys, "predict", folder, "--figures", tmp_path / "figures", status=1).err
    assert "--figures: needs one label per sample" in refused
    assert not (folder / "predictions.csv").exists()

    output(capsys, "predict", folder)
    with (folder / "predictions.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    of_head = ["head", "head-Mass", "head-Effusion", "head-Cough"]
    assert [name for name in rows[0] if name.startswith("head")] == of_head
    assert {row["prototype-Cough"] for row in rows} == {""}
    assert "" not in {row["prototype-Mass"] for row in rows}

    model = export_model(folder, tmp_path / "m", "site-1")
    assert "| exact match by head |" in (model / "README.md").read_text(encoding="utf-8")
    (answer,) = Predictor.load(model).predict(inputs[:1], by="prototype")
    assert answer.probabilities["Cough"] is None
    assert answer.probabilities["Mass"] is not None


# -- later
@pytest.mark.parametrize(
    ("task", "names", "known_before"),
    [
        ("multi-label", ["Mass", "Effusion", "Cough"], ["Effusion", "Mass"]),
        ("single-label", ["a", "b", "c"], ["a", "c"]),
    ],
)
def test_a_site_with_a_new_name_comes_later(task, names, known_before, tmp_path):
    """A run that goes on from an earlier one may add a name of a class or label, not leave one out.

    Its moments are those of one run of both sites, although the first knows nothing of the new
    name.
    """
    inputs, _ = several()
    rng = np.random.default_rng(8)
    kept, lost = known_before
    without_lost = [kept, "other"]
    files = {
        "first": (known_before, inputs[:120]),
        "later": (names, inputs[120:]),
        "less": (without_lost, inputs),
    }
    for site, (known, of_site) in files.items():
        if task == "multi-label":
            labels = rng.integers(2, size=(len(of_site), len(known)))
        else:
            labels = np.array(known)[rng.integers(len(known), size=len(of_site))]
        np.savez(tmp_path / f"{site}.npz", inputs=of_site, labels=labels, classes=known)

    def run(folder, classes, *sites, start_from=""):
        """Run gaussian heads at these sites, and return the folder of the results."""
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
        run("three", without_lost, "less", start_from=earlier)


# -- refused
@pytest.mark.parametrize("algo", [name for name in CATALOG if name not in ABLE])
def test_methods_of_one_label_a_sample_refuse_several_by_name(algo, tmp_path):
    with pytest.raises(SettingsError, match=f"{algo} does not learn several labels a sample"):
        Settings.from_run_config(config_of(tmp_path, tmp_path, algo=algo))


@pytest.mark.parametrize(("setting", "why"), [
    ({"dp": "sample"}, "a sample of several labels adds to several classes"),
    ({"dataset": "digits", "classes": ""}, "dataset 'digits' is not of this kind"),
    ({"dataset": "text-csv"}, "dataset 'text-csv' is not of this kind"),
    ({"positive_rate": 0.5}, "hides labels of samples that have one each"),
    ({"metrics": "recall"}, "'recall' is not one of auc"),
    ({"baselines": "fedgen"}, "fedgen does not learn several labels"),
    ({"algo": "fedplvm", "min_class_samples": 3}, "sends clusters of samples"),
    ({"task": "single-label", "annotated_labels": 2}, "only with several labels a sample"),
])  # fmt: skip
def test_settings_that_do_not_go_with_several_labels_are_refused(setting, why, tmp_path):
    config = config_of(tmp_path, arrays_in(tmp_path), **{"algo": "fedproto", **setting})
    with pytest.raises((SettingsError, DataError), match=why):
        check_data_settings(Settings.from_run_config(config).data)


# -- afterwards
def test_an_exported_model_says_how_likely_each_label_is(tmp_path, capsys):
    """In Python and on the command line; three quarters of the known labels are right at 0.5."""
    config = config_of(tmp_path, arrays_in(tmp_path), algo="fedproto")
    outcome = run_federation(config, clients=3)
    model = export_model(outcome.folder, tmp_path / "m", "site-1")
    inputs, labels = several()
    answers = Predictor.load(model).predict(inputs, by="prototype")
    probabilities = np.array([list(answer.probabilities.values()) for answer in answers])
    assert list(answers[0].probabilities) == NAMES.split(",")
    is_right = (probabilities > 0.5) == (labels == 1)
    assert np.mean(is_right, where=~np.isnan(labels)) > 0.75

    np.save(tmp_path / "new.npy", inputs[:2])
    said = output(capsys, "predict", model, tmp_path / "new.npy", "--json").out
    assert '"probability of Effusion": ' in said
    assert "3: Mass, Effusion, Cough" in (model / "README.md").read_text()


@pytest.mark.parametrize("algo", ["fedproto", "fedproto-avg"])
@pytest.mark.parametrize("lacking", [[0], [0, 1, 2]])
def test_a_client_takes_part_whose_samples_all_lack_a_label(algo, lacking, tmp_path):
    """No sample has a mass, or any finding: each client sends the prototype of those without."""
    inputs, labels = several()
    labels[:, lacking] = np.where(np.isnan(labels[:, lacking]), np.nan, 0)
    file = tmp_path / "findings.npz"
    np.savez(file, inputs=inputs, labels=labels)

    outcome = run_federation(config_of(tmp_path, file, algo=algo, rounds=2), clients=3)

    assert outcome.per_row("refused") == 3 * [{}]
    assert outcome.per_row("valid") == 3 * [3]
