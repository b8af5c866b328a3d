"""Data of the user's own: manifests, arrays, texts, functions, Hugging Face folders.

And errors that say where.
"""

import sys
from pathlib import Path
from types import ModuleType
from unicodedata import normalize
from zipfile import ZipFile

import numpy as np
import pytest
from PIL import Image

from protofl_common.config.architectures import VOCABULARY
from protofl_common.config.options import SettingsError
from protofl_common.config.python_names import allow
from protofl_common.data import open_client_data
from protofl_common.data.door import from_arrays
from protofl_common.data.own import tokens
from protofl_common.experiment.node import NodeConfig
from protofl_common.experiment.settings import Settings, default_run_config
from protofl_common.tools.site.stored import stored_at
from tests.unit.protofl_common.data.conftest import refused

HEADER = "age,label,dose,client,split\n"
TABLE = f"""{HEADER}1,sick,2.5,north,train
2,well,3,north,test
3,sick,4,south,train
4,well,5,south,test
"""


@pytest.fixture
def divided(open_clients, tmp_path):
    """``divided(2, text)``: what each of two clients has of the CSV table with these lines.

    Each call writes its table into a file of its own: 0.csv, 1.csv, …
    """

    def open_(clients, text, **changes):
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.csv"
        file.write_text(text)
        settings = {"partition": "natural", "train_samples": 0, **changes}
        return open_clients(clients, dataset="arrays", data_dir=str(file), **settings)

    return open_


def test_a_table_of_numbers_with_its_own_clients_and_split(write_and_read):
    """The columns label, client and split have their meaning; blanks around values do not count."""
    with_blanks = TABLE.replace("sick,", " sick ,", 1).replace(",north,", ", north,", 1)

    data = write_and_read("arrays", "a.csv", with_blanks)

    assert data.inputs.dtype == np.float32
    assert data.inputs.tolist() == [[1, 2.5], [2, 3], [3, 4], [4, 5]]
    assert data.classes == ("sick", "well")
    assert data.labels.tolist() == [0, 1, 0, 1]
    assert data.domain_names == ("north", "south")
    assert data.domains.tolist() == [0, 0, 1, 1]
    assert data.official.tolist() == [0, 1, 0, 1]
    assert data.mean == (2.0, 3.25)  # of the training samples
    with_classes = write_and_read("arrays", "b.csv", TABLE, classes="well,sick")
    assert with_classes.labels.tolist() == [1, 0, 1, 0]


def test_the_users_clients_and_split_are_respected(divided, data_settings, tmp_path):
    """Clients are those of the file; a site of one domain has that client's rows."""
    north, south = divided(2, TABLE, test_from="official-own")  # which writes 0.csv
    assert (north.domain, south.domain) == ("north", "south")
    assert north.train_inputs.tolist() == [[1, 2.5]]
    assert north.test_inputs.tolist() == [[2, 3]]
    assert south.test_labels.tolist() == [1]

    settings = data_settings(
        dataset="arrays",
        data_dir=f"{tmp_path}/0.csv",
        partition="natural",
        test_from="official-own",
    )
    alone = open_client_data(settings, seed=1, partition=0, num_partitions=1, domain="south")
    assert alone.train_inputs.tolist() == [[3, 4]]


def test_the_users_clients_and_split_must_fit_the_run(divided):
    with refused("the data name 2 clients, not 1"):
        divided(1, TABLE, test_from="official-own")

    untested_south = TABLE.replace("south,test", "south,train")
    with refused("test-from = 'official-own': a client has 2 training and 0 test samples"):
        divided(2, untested_south, test_from="official-own")


@pytest.mark.parametrize("patients", [40, 6, 3, 2])
def test_at_a_site_no_patient_is_both_for_training_and_for_testing(patients, divided):
    """A rare class has some of its patients for testing, whatever other classes they have.

    ``patients``: their number. Class b is of every fifth patient, and only in the second half.
    """
    text = "x,label,client\n"
    for row in range(400):
        patient = row % patients
        label = "b" if patient % 5 == 0 and row > 200 else "a"
        text += f"{patient},{label},P{patient}\n"

    (site,) = divided(1, text, partition="own", train_samples=90, validation_fraction=0.25)

    train = set(site.train_inputs.ravel().tolist())
    test = set(site.test_inputs.ravel().tolist())
    validation = set(site.validation_inputs.ravel().tolist())
    assert train.isdisjoint(test)
    assert validation.isdisjoint(train | test)
    assert len(train | test | validation) >= patients - 2  # the cap on training leaves out some

    # three patients are too few for a validation side, and for a tested one of class b
    assert train
    assert test
    assert bool(validation) == (patients > 3)
    assert set(site.train_labels.tolist()) == {0, 1}
    assert set(site.test_labels.tolist()) == ({0, 1} if patients > 3 else {0})
    assert site.domain == ""


def test_who_has_the_last_samples_of_a_class_is_trained_on(divided):
    """Five of six patients have a class r1 … r5 that nobody else has; so P0 alone can be tested.

    In the second table two patients have class c (label 2): one of them must be trained on.
    """
    text = "x,label,client\n0,a,P0\n"
    for patient in range(1, 6):
        text += f"{patient},a,P{patient}\n{patient},r{patient},P{patient}\n"
    (site,) = divided(1, text, partition="own")
    assert site.test_inputs.tolist() == [[0]]

    c_of_two_patients = "x,label,client\n0,a,P0\n0,c,P0\n1,b,P1\n1,c,P1\n2,a,P2\n3,b,P3\n"
    for seed in range(9):
        (site,) = divided(1, c_of_two_patients, partition="own", seed=seed)
        assert 2 in site.train_labels


def many_with_one_large(column):
    """Return a table of 600 samples whose ``column`` has one value often and 149 twice each.

    Half of the samples have 0 there. The input x is the same value, so it tells whose samples
    these are.
    """
    text = f"x,label,{column}\n"
    for row in range(600):
        value = max(0, row - 300) // 2
        text += f"{value},{'ab'[row % 2]},{value}\n"
    return text


@pytest.mark.parametrize("column", ["domain", "client"])
@pytest.mark.parametrize(
    "partition", ["own", "iid", "dirichlet", "pathological", "n-way-k-shot", "label-shift"]
)
@pytest.mark.parametrize("test_from", ["split", "balanced"])
def test_no_patient_is_trained_on_and_tested_by_anybody(partition, test_from, column, divided):
    """Nor is one validated on who is trained on. A scanner (a domain) is both.

    A pathological partition takes as many patients for testing as its classes need.
    """
    clients = divided(
        3,
        many_with_one_large(column),
        partition=partition,
        test_from=test_from,
        ways=2,
        ways_stdev=0,
        shots=30,
        alpha=9.0,
        validation_fraction=0.1,
    )

    train = np.concatenate([client.train_inputs for client in clients])
    test = np.concatenate([client.test_inputs for client in clients])
    validation = np.concatenate([client.validation_inputs for client in clients])
    assert np.isin(test, train).any() == (column == "domain")
    assert np.isin(validation, train).any() == (column == "domain")
    if test_from == "split" and partition != "pathological":
        tested = len(test) / (len(train) + len(validation) + len(test))
        assert 0.22 < tested < 0.28  # about a quarter, as train-fraction is 0.75


@pytest.mark.parametrize("test_from", ["split", "balanced"])
@pytest.mark.parametrize("seed", range(4))
def test_each_of_many_clients_has_a_patient_to_test_on(seed, test_from, divided):
    skewed = {"partition": "dirichlet", "alpha": 0.1}
    clients = divided(20, many_with_one_large("client"), **skewed, test_from=test_from, seed=seed)
    assert all(len(client.test_labels) > 0 for client in clients)


@pytest.mark.parametrize(
    "partition", ["iid", "dirichlet", "balanced-dirichlet", "pathological", "label-shift"]
)
def test_a_test_part_at_the_end_of_the_file_is_divided_as_the_rest(partition, divided):
    """The last quarter of the file is for testing; no client has all of it, or none."""
    text = "x,label,split\n"
    for row in range(400):
        text += f"{row},{row % 2},{'test' if row >= 300 else 'train'}\n"

    clients = divided(4, text, partition=partition, test_from="official-own", alpha=5.0)

    for client in clients:
        test = len(client.test_labels)
        assert 0.1 < test / (len(client.train_labels) + test) < 0.45
    assert sum(len(client.test_labels) for client in clients) == 100


MARKED = TABLE.replace("4,well", "9,well,7,north,validation\n8,sick,7,south,validation\n4,well")
MARKED += "5,sick,1,south,train\n"
"""`TABLE` with a validation sample of each client: north's has the age 9, south's 8."""


def ages(inputs):
    """Return the first column of the table, which tells the samples apart."""
    return inputs[:, 0].tolist()


@pytest.mark.parametrize("test_from", ["official-own", "split"])
@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_a_part_marked_for_validation_is_used_as_it_stands(test_from, fraction, divided):
    """Each client uses its own rows of it, whatever the fraction and the rest of the split."""
    north, south = divided(2, MARKED, test_from=test_from, validation_fraction=fraction)

    assert ages(north.validation_inputs) == [9]
    assert ages(south.validation_inputs) == [8]
    assert sorted(ages(north.train_inputs) + ages(north.test_inputs)) == [1, 2]
    assert sorted(ages(south.train_inputs) + ages(south.test_inputs)) == [3, 4, 5]
    if test_from == "official-own":
        assert ages(north.train_inputs) == [1]
        assert sorted(ages(south.train_inputs)) == [3, 5]


def test_the_marked_validation_part_is_common_with_the_test_part_and_never_tested_on(divided):
    """With ``official-all`` all clients have the part in common, with ``balanced`` each its own."""
    everybody = divided(2, MARKED, test_from="official-all")
    assert [ages(client.validation_inputs) for client in everybody] == [[9, 8], [9, 8]]

    # the test part has no sick sample, and the one for validation does not take its place
    with refused("no sample of classes sick"):
        divided(2, MARKED, test_from="official")

    # Five samples for each client and class, the last of them for validation. A sample's age is the
    # number of its row: north has ages 0 to 9, south 10 to 19.
    rows = []
    for client in ("north", "south"):
        for label in ("well", "sick"):
            for part in ("train", "train", "test", "test", "validation"):
                rows.append(f"{len(rows)},{label},1,{client},{part}\n")
    north, south = divided(2, HEADER + "".join(rows), test_from="balanced", train_fraction=0.75)
    assert ages(north.validation_inputs) == [4, 9]
    assert ages(south.validation_inputs) == [14, 19]
    for client, first in ((north, 0), (south, 10)):
        assert sorted(client.test_labels.tolist()) == [0, 1]
        used = ages(client.train_inputs) + ages(client.test_inputs)
        assert sorted(used) == [first + age for age in (0, 1, 2, 3, 5, 6, 7, 8)]


def test_no_shot_is_marked_for_validation(divided):
    """A client's validation samples are all marked ones of its classes, as with `official`."""
    text = HEADER
    for number in range(60):
        text += f"{number},{'abc'[number % 3]},{number},x,train\n"
    for number in range(60):
        text += f"{100 + number},{'abc'[number % 3]},0,x,validation\n"

    shots = {"partition": "n-way-k-shot", "ways": 2, "ways_stdev": 0, "shots": 3}
    for client in divided(4, text, train_fraction=0.5, **shots):
        classes = set(client.train_labels.tolist())
        assert len(classes) == 2
        assert len(client.train_labels) == len(client.test_labels) == 6
        assert max(ages(client.train_inputs) + ages(client.test_inputs)) < 60
        wanted = [100 + number for number in range(60) if number % 3 in classes]
        assert ages(client.validation_inputs) == wanted


def test_arrays_of_every_kind(write_and_read):
    """Bytes are images, floating point numbers signals, and whole numbers tokens of texts."""

    def read_arrays(**arrays):
        return write_and_read("arrays", "a.npz", arrays)

    pixels = np.arange(3 * 81, dtype=np.uint8).reshape(3, 1, 9, 9)
    images = read_arrays(inputs=pixels, labels=[0, 1, 1])
    assert images.inputs.dtype == np.uint8

    signal = read_arrays(
        inputs=np.arange(30.0).reshape(3, 2, 5), labels=[0, 1, 1], client=["a", "b", "b"]
    )
    assert signal.inputs.dtype == np.float32
    assert len(signal.mean) == 2
    assert signal.domain_names == ("a", "b")

    words = read_arrays(inputs=np.ones((3, 4), np.int32), labels=[0, 1, 1], classes=["x", "y"])
    assert words.inputs.dtype == np.int64
    assert words.mean == ()
    assert words.classes == ("x", "y")


def test_arrays_named_by_parts_are_joined_or_refused(write_and_read):
    """x_train, y_train, x_test, … are the inputs and labels of a part each."""
    parts = {"x_mean": np.zeros(3)}  # not of a part, so it is left out
    for value, part in enumerate(("train", "test", "validation")):
        parts[f"x_{part}"] = np.full((2, 3), float(value))
        parts[f"y_{part}"] = np.arange(2)

    data = write_and_read("arrays", "a.npz", parts)

    assert data.official.tolist() == [0, 0, 1, 1, 2, 2]
    assert data.mean == (0.0, 0.0, 0.0)  # of the training samples
    assert data.notes[0].endswith("a.npz: left out the arrays x_mean")
    with refused(r"'x_val' is of no part train, test or validation"):
        write_and_read("arrays", "v.npz", parts | {"x_val": np.eye(2), "y_val": np.arange(2)})
    with refused("has inputs, and x_… beside them"):
        write_and_read("arrays", "b.npz", parts | {"inputs": np.eye(2), "labels": np.arange(2)})
    small_train = {"x_train": np.eye(2), "y_train": [0, 1]}
    large_test = {"x_test": np.eye(3), "y_test": [1, 0, 1]}
    with refused("the parts train, test differ in shape"):
        write_and_read("arrays", "p.npz", small_train | large_test)


def test_npz_files_without_plain_arrays_in_them_are_refused(read_dataset, tmp_path):
    """Rows of different lengths; a single array under that name; damaged bytes."""
    uneven = np.array([[1.0], [1.0, 2.0]], object)
    np.savez(tmp_path / "odd.npz", inputs=uneven, labels=[0, 1])

    np.save(tmp_path / "one.npy", np.eye(2))
    (tmp_path / "one.npy").rename(tmp_path / "one.npz")

    torn = tmp_path / "torn.npz"
    np.savez_compressed(torn, inputs=np.zeros((600, 40)), labels=np.zeros(600, int))
    contents = bytearray(torn.read_bytes())
    contents[120:130] = b"\xff" * 10  # within the compressed inputs
    torn.write_bytes(contents)

    for name in ("odd.npz", "one.npz", "torn.npz"):
        with refused(f"{name} cannot be read as plain NumPy arrays, series of one length"):
            read_dataset("arrays", tmp_path / name)
    with refused(r"several: odd\.npz, one\.npz, torn\.npz; name one"):
        read_dataset("arrays", tmp_path)


def test_a_manifest_of_images(write_and_read, tmp_path):
    """A list names image files with label, client and part; errors name its line."""
    (tmp_path / "scans").mkdir()
    for grey, name in ((90, "a.png"), (91, "scans/b.png")):
        Image.fromarray(np.full((5, 7), grey, np.uint8)).save(tmp_path / name)

    text = "file,label,client,split\na.png,cat,north,train\nscans/b.png,dog,south,test\n"
    data = write_and_read("manifest", "list.csv", text, image_size=8)
    assert data.inputs.shape == (2, 3, 8, 8)
    assert data.classes == ("cat", "dog")
    assert data.official.tolist() == [0, 1]

    with refused(r"list2\.csv, line 2, column 'file': there is no file 'none\.png'"):
        write_and_read("manifest", "list2.csv", "file,label\nnone.png,cat\n")
    with refused("line 3 has split 'later'; must be train, validation or test"):
        write_and_read(
            "manifest", "list3.csv", "file,label,split\na.png,cat,test\na.png,dog,later\n"
        )
    with refused("column 'Split' would be left out; call it 'split'"):
        write_and_read(
            "manifest", "list5.csv", "file,label,Split\na.png,cat,train\nscans/b.png,dog,test\n"
        )
    with_more = write_and_read(
        "manifest", "list6.csv", "file,label,age\na.png,cat,3\nscans/b.png,dog,5\n"
    )
    assert any("left out the columns age" in note for note in with_more.notes)


def test_a_manifests_images_may_change_elsewhere(read_dataset, tmp_path):
    """Images outside the manifest's folder are read again when they have changed."""
    scans = tmp_path / "scans"
    lists = tmp_path / "lists"
    scans.mkdir()
    lists.mkdir()
    Image.fromarray(np.full((5, 7), 90, np.uint8)).save(scans / "b.png")
    (lists / "a.csv").write_text("file,label\n../scans/a.png,x\n../scans/b.png,y\n")

    for grey, width in ((10, 8), (99, 16)):
        Image.fromarray(np.full((8, width), grey, np.uint8)).save(scans / "a.png")
        assert read_dataset("manifest", lists, image_size=8).inputs[0].max() == grey


@pytest.mark.parametrize(("contents", "said"), [
    ("a,b\n1,2\n", "has no column 'label'; its columns: a, b"),
    ("a;label\n1,5;x\n1.005,5;y\n", r"line 2, column 'a': '1,5' is not a finite number"),
    ("a,label\n1,x\n2,y\ntall,x\n", "line 4, column 'a': 'tall' is not a finite number"),
    ("a,label\n1,x\n,y\n", "line 3, column 'a': '' is not a finite number"),
    ("a,label\n1,x\n1,2,3\n", "line 3: 3 values; there are 2 columns"),
    ("a,label\n1,x\nnan,y\n", "line 3, column 'a': 'nan' is not a finite number"),
    ("a,label\n1,x\n1e99,y\n", "has a number that is too large"),
    ("a,label\n", "has no rows"),
    ("client,label\nx,1\nx,2\n", "has no column for the inputs"),
    ("\n\na,label\n1,x\n2,", "line 5 has no label"),
    ("a,label\n1,\udcfc\n", r"read as CSV in UTF-8 \(.* can't decode byte 0xfc"),
    ("a,label\n1,x\n2,\n3,\n", r"line 3 has no label \(''; 2 in all\)"),
    ("a,label,client\n1,x,north\n2,y,\n", "line 3 has no client"),
    (",a,label\n0,1,x\n1,2,y\n", "column 1 has no name; give it one, or leave it out"),
    ("Unnamed: 0,a,label\n0,1,x\n1,2,y\n", "column 1 has no name"),
    ("a,a,label\n0,1,x\n1,2,y\n", "several columns are called 'a'"),
    ("a,label,split\n0,x,test\n1,y,test\n", "split marks no sample for training"),
    (
        "a,label\n1,sick\n2,well\n3,Sick\n4,NA\n5,none\n",
        "labels 'NA', 'Sick', 'sick' are alike .*, or stand for none",
    ),
    (
        "a,Client,label\n0,1,x\n1,2,y\n",
        "column 'Client' would be an input; call it 'client', or drop it",
    ),
])  # fmt: skip
def test_a_wrong_table_is_named_by_line_column_and_value(write_and_read, contents, said):
    with refused(said):
        write_and_read("arrays", "wrong.csv", contents)


def test_what_data_cannot_serve_for_is_said(write_and_read, open_clients, divided):
    """Each refusal names the setting or the line, and what was found there."""
    with refused("dataset 'wine' has no domains"):
        open_clients(2, dataset="wine", partition="natural")

    with refused(r"image-size = 8: only images can be resized; a sample is float32 \[13\]"):
        open_clients(2, dataset="wine", partition="iid", image_size=8)

    with refused("line 3 has the label 'well', which is none of classes = 'sick,dead'"):
        write_and_read("arrays", "a.csv", TABLE, classes="sick,dead")

    with refused(r"a client has 2 training and 0 test samples; .* or of one `client`, or use"):
        divided(1, "x,label,client\n1,a,P1\n2,b,P2\n", partition="own")

    one_sample_of_each_class = "a,label\n"
    for label in range(9):
        one_sample_of_each_class += f"{label},{label}\n"
    with refused(r"a client has \d training and \d test samples"):
        divided(2, one_sample_of_each_class, partition="n-way-k-shot")


ONES = np.ones((2, 2))


@pytest.mark.parametrize(("arrays", "said"), [
    ({"labels": [1]}, "has no 'inputs', only 'labels'"),
    ({"inputs": np.zeros((2, 3)), "labels": [1]}, r"labels has shape \[1\]; there are 2 inputs"),
    ({"inputs": ONES, "labels": None}, "has no 'labels'"),
    ({"inputs": ONES, "labels": [1.0, np.nan]}, r"sample 1 has no label \(nan; 1 in all\)"),
    ({"inputs": ONES, "labels": np.array([1, None])}, "sample 1 has no label"),
    (
        {"inputs": ONES, "labels": [1, 2], "classes": ["a", "b"]},
        "the label '2', which is none of classes",
    ),
    (
        {"inputs": ONES, "labels": [0, 0], "classes": "ab"},
        "classes = 'ab': must be different names",
    ),
    ({"inputs": ONES, "labels": [0, 0], "classes": ["a", "a"]}, "must be different names"),
])  # fmt: skip
def test_wrong_labels_are_refused(arrays, said):
    with refused(said):
        from_arrays(arrays, "here")


@pytest.mark.parametrize(("inputs", "said"), [
    (np.zeros(2), r"inputs are float64 \[2\], not numbers"),
    (np.zeros((2, 0)), r"inputs are float64 \[2, 0\], not numbers"),
    (np.zeros((2, 3), np.uint8), "bytes must be images .*; give numbers as float"),
    (np.zeros((2, 1, 8, 8), np.uint16), r"inputs are uint16 \[2, 1, 8, 8\]: .*floating"),
    (np.array([[1, -1], [1, 1]]), "sample 0 has a token below 0"),
])  # fmt: skip
def test_wrong_inputs_are_refused(inputs, said):
    with refused(said):
        from_arrays({"inputs": inputs, "labels": [1, 2]}, "here")


def test_labels_are_names_or_indices():
    """Whole numbers from 0 are indices if ``classes`` has names that they are not."""

    def labels(given, setting="", **more):
        """Return labels and classes of data; ``setting`` is that of ``classes``."""
        arrays = {"inputs": np.ones((len(given), 1)), "labels": given, **more}
        data = from_arrays(arrays, "here", setting)
        return data.labels.tolist(), data.classes

    assert labels([3, 10, 3]) == ([0, 1, 0], ("3", "10"))
    assert labels([1.0, 2.0]) == ([0, 1], ("1", "2"))
    assert labels([1, 0], "no,yes") == ([1, 0], ("no", "yes"))
    assert labels([1, 2], "1,2,3") == ([0, 1], ("1", "2", "3"))
    assert labels([1, 2], "1,2,other") == ([0, 1], ("1", "2", "other"))  # a site without others
    assert labels([-1, 1], "-1,1") == ([0, 1], ("-1", "1"))
    assert labels(np.array([True, False]), "True,False") == ([0, 1], ("True", "False"))
    assert labels([0, 1], classes=["1", "2"]) == ([0, 1], ("1", "2"))
    assert labels([0, 1], classes=["0", "1", "2"]) == ([0, 1], ("0", "1", "2"))
    # the data have the classes of the setting in another order, or also one that it lacks
    assert labels([0, 1], "b,a", classes=["a", "b"]) == ([1, 0], ("b", "a"))
    assert labels(["a", "c"], "c,a", classes=["a", "b"]) == ([1, 0], ("c", "a"))
    assert labels([1, 2], "1,2,3", classes=["1", "2", "3"]) == ([0, 1], ("1", "2", "3"))
    assert labels([0, 1], "no,yes", classes=["0", "1"]) == ([0, 1], ("no", "yes"))
    with refused("the label 'c', which is none of classes = 'b,a'"):
        labels([0, 2], "b,a", classes=["a", "b", "c"])
    with refused("the label '2', which is none of classes = 'b,a'"):
        labels([0, 2], "b,a", classes=["a", "b"])
    with refused("labels that are numbers are indices into classes, from 0; these are 1, 2, 3"):
        labels([1, 2], classes=["1", "2", "3"])  # as np.unique has them; 1 would be "2"
    assert labels(["b", "a"]) == ([1, 0], ("a", "b"))
    assert labels(["b", "a"], classes=None) == ([1, 0], ("a", "b"))


def test_names_as_macos_writes_them_are_those_of_others(write_and_read):
    """macOS writes an umlaut in a file's name as two characters (NFD)."""
    text = "größe,art,label,client\n1,süß,bösartig,Köln\n2,herb,gut,Köln\n"
    rows = text.partition("\n")[2]
    mixed = normalize("NFD", text) + rows  # the same two rows in both spellings
    one_hot = "art:süß|herb"

    for form in ("NFC", "NFD"):
        data = write_and_read(
            "arrays",
            "a.csv",
            mixed,
            classes=normalize(form, "gut,bösartig"),
            columns=normalize(form, "größe,art"),
            one_hot=normalize(form, one_hot),
        )
        assert data.classes == ("gut", "bösartig")
        assert data.domain_names == ("Köln",)
        assert data.labels.tolist() == [1, 0, 1, 0]
        assert data.columns == ("größe", "art:süß|herb")
        assert data.inputs.tolist() == [[1, 1, 0], [2, 0, 1], [1, 1, 0], [2, 0, 1]]
    assert write_and_read("arrays", "b.csv", mixed, one_hot=one_hot).classes == ("bösartig", "gut")

    cologne = normalize("NFD", "Köln")
    assert NodeConfig.of({"site-name": "north", "domain": cologne}).domain == "Köln"
    asked = Settings.from_run_config(default_run_config() | {"new-domain": cologne})
    assert asked.federation.new_domain == "Köln"


def test_texts_with_and_without_a_header(write_and_read):
    """Without one the first column is the label, and all others are joined to a text."""
    news = write_and_read(
        "text-csv", "news.csv", '"3","Fears, again","The end"\n"1","Good","news"\n', text_length=4
    )
    assert news.classes == ("1", "3")
    assert news.columns == ()  # a file to predict need not call them as we do
    assert news.inputs.tolist() == tokens(["fears , again the", "GOOD NEWS"], 4).tolist()
    assert news.inputs[1, 2:].tolist() == [0, 0]

    first_row_again = '"3","a b"\n"1","c"\n"3","a b"\n'
    assert write_and_read("text-csv", "twice.csv", first_row_again).labels.tolist() == [1, 0, 1]

    # such a header is of no model
    with refused("categories: a name has no line break, and at most 200 characters"):
        write_and_read("text-csv", "long.csv", f"label,{'why ' * 51}\nx,one\ny,two\n")
    with refused("has no column 'label', only category, text"):
        write_and_read("text-csv", "odd.csv", "category,text\nsport,one\nsport,two\n")
    with refused("'label_text' says the label in other words"):
        write_and_read(
            "text-csv", "l.csv", "label,text,label_text\n0,one,bad\n1,two,good\n0,three,bad\n"
        )


def test_texts_of_a_training_and_a_test_file(read_dataset, tmp_path):
    """A folder with train.csv and test.csv is one data set of two parts."""

    def of_two_files(train, test):
        """Read a folder with these two files; ``official`` is 1 for samples of the test file."""
        (tmp_path / "train.csv").write_text(train)
        (tmp_path / "test.csv").write_text(test)
        return read_dataset("text-csv", tmp_path)

    test = "label,text\ny,three\n"
    data = of_two_files("label,text\nx,one\ny,two\n", test)
    assert data.official.tolist() == [1, 0, 0]
    assert data.labels.tolist() == [1, 0, 1]
    assert data.columns == ("text",)

    with refused("only one of its files has a column title"):
        of_two_files("label,title,text\nx,a,one\ny,b,two\n", test)
    with refused("only one of its files has a column client"):
        of_two_files("label,text,client\nx,one,a\ny,two,b\n", test)

    # of three test texts, who wrote one says its label, by chance
    by_writers = of_two_files(
        "label,text,by,split\nx,one,a,train\ny,two,b,validation\n",
        "label,text,by,split\ny,three,a,test\nx,four,b,test\nx,five,b,test\n",
    )
    assert by_writers.official.tolist() == [1, 1, 1, 0, 2]

    with refused("column 'Split' would be an input; call it 'split'"):
        of_two_files(
            "label,text,Split\nx,one,train\ny,two,test\n", "label,text,Split\ny,six,test\n"
        )
    (tmp_path / "validation.csv").write_text(test)
    with_a_third = of_two_files("label,text\nx,one\ny,two\n", test)
    assert any("left out validation.csv" in note for note in with_a_third.notes)


def test_a_token_is_a_checksum_of_its_word():
    """The checksum is crc32, within the vocabulary; 0 is padding. crc32("a") is 3904355907."""
    a = 1 + 3904355907 % (VOCABULARY - 1)
    assert tokens(["A a", ""], 3).tolist() == [[a, a, 0], [0, 0, 0]]


OWN = """
import numpy as np
ARRAYS = {"inputs": np.eye(4), "labels": [0, 1, 0, 1], "client": ["a", "a", "b", "b"]}
def load(data_dir):
    if data_dir != "":
        return 1 / 0
    return ARRAYS
def nothing(data_dir):
    return 3
def misspelt(data_dir):
    return {**ARRAYS, "spilt": ["train"] * 4}
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """The name of a module with the functions of OWN, which may be imported."""
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    allow([name, "no_such_module"])
    return name


def test_a_function_of_the_users_own(own_module, read_dataset, tmp_path):
    """The function returns a dictionary of arrays; here it fails if it is given a folder."""
    data = read_dataset(f"{own_module}:load")
    assert data.inputs.tolist() == np.eye(4).tolist()
    assert data.domain_names == ("a", "b")

    absent = f"{own_module}:absent"
    with pytest.raises(SettingsError, match=f"dataset = '{absent}': {own_module} has no absent"):
        read_dataset(absent)
    said = "no_such_module cannot be imported .*put its folder on PYTHONPATH"
    with pytest.raises(SettingsError, match=said):
        read_dataset("no_such_module:load")
    with refused("returned int, not a dictionary of arrays"):
        read_dataset(f"{own_module}:nothing")
    with refused("returned 'spilt'; choose among inputs, labels, client, split, classes"):
        read_dataset(f"{own_module}:misspelt")
    with refused(r"it failed \(ZeroDivisionError"):
        read_dataset(f"{own_module}:load", tmp_path)


def test_data_of_edited_code_are_read_again(read_dataset, tmp_path, monkeypatch):
    """This holds even if the edit is in a module that the function's module imports."""
    package = tmp_path / "pack_age"
    package.mkdir()
    (package / "load.py").write_text(
        "from pack_age.more import *\ndef load(_): return dict(inputs=X, labels=[0, 1])"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    allow(["pack_age"])

    for number in (1.0, 12.0):
        (package / "more.py").write_text(f"X = [[{number}], [3.0]]")
        data = read_dataset("pack_age.load:load")
        assert data.inputs[0].tolist() == [number]
        # as in the next process, which imports it anew
        for module in [name for name in sys.modules if name.startswith("pack_age")]:
            monkeypatch.delitem(sys.modules, module)


def test_code_of_no_file_cannot_be_watched_for_edits(read_dataset, tmp_path, monkeypatch):
    """A module of a notebook, and one in a zip file, are refused."""
    notebook = ModuleType("note_book")
    exec("def load(data_dir): ...", vars(notebook))
    monkeypatch.setitem(sys.modules, "note_book", notebook)
    with ZipFile(tmp_path / "code.zip", "w") as archive:
        archive.writestr("in_zip.py", "def load(data_dir): ...")
    monkeypatch.syspath_prepend(tmp_path / "code.zip")
    allow(["note_book", "in_zip"])

    for name in ("note_book", "in_zip"):
        with refused(f"dataset = '{name}:load': stands in no file, as in a notebook"):
            read_dataset(f"{name}:load")


@pytest.fixture
def reviews(tmp_path):
    """Save a training and a test set as Hugging Face does, as ``reviews`` in `tmp_path`.

    Return both sets. The name of the training part, ``train_valley``, is as people make them up.
    """
    datasets = pytest.importorskip("datasets")
    kinds = datasets.Features(
        title=datasets.Value("string"),
        text=datasets.Value("string"),
        label=datasets.ClassLabel(names=["bad", "good"]),
    )
    texts = {"title": ["so", "so"], "text": ["bad", "good"]}
    train = datasets.Dataset.from_dict({**texts, "label": [0, 1]}, features=kinds)
    test = datasets.Dataset.from_dict({**texts, "label": [1, 1]}, features=kinds)
    datasets.DatasetDict(train_valley=train, test=test).save_to_disk(tmp_path / "reviews")
    return train, test


def test_texts_of_a_folder_of_hugging_face(reviews, read_dataset, tmp_path):
    """Columns of text are joined; parts have their names, and odd ones are refused."""
    import datasets

    data = read_dataset("hf:reviews", tmp_path, text_length=3)
    assert data.classes == ("bad", "good")
    assert data.columns == ("title", "text")  # a run's first lines name the columns
    assert data.official.tolist() == [0, 0, 1, 1]
    assert data.inputs.tolist() == tokens(["so bad", "so good"] * 2, 3).tolist()
    assert data.labels.tolist() == [0, 1, 1, 1]
    # the run has the classes in another order
    assert read_dataset("hf:reviews", tmp_path, classes="good,bad").labels.tolist() == [1, 0, 0, 0]

    train, test = reviews
    with_words = {
        "a": train.add_column("label_text", ["0", "1"]),
        "b": test.add_column("label_text", ["1", "1"]),
    }
    for parts, said in (
        ({"test_matched": train}, "part 'test_matched'"),
        ({"Val": train}, "part 'Val'"),
        ({"train": train, "clean_test": test}, "part 'clean_test'"),
        ({"train": train, "holdout": test}, "part 'holdout'"),
        (with_words, "'label_text' says the label in other words"),
    ):
        datasets.DatasetDict(parts).save_to_disk(tmp_path / "wrong")
        with refused(said):
            read_dataset("hf:wrong", tmp_path)


def test_tables_of_a_folder_of_hugging_face(read_dataset, tmp_path, capsys):
    """Columns of numbers are inputs; a mix of kinds is refused until some are dropped."""
    datasets = pytest.importorskip("datasets")

    def saved_and_read(columns, **settings):
        datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "table")
        return read_dataset("hf:table", tmp_path, **settings)

    columns = {"a": [1.0, 2.0], "b": [3.0, 4.0], "label": [5, 7]}
    marks = {"client": ["x", "y"], "split": ["train", "test"]}
    table = saved_and_read(columns | marks)
    assert table.inputs.tolist() == [[1, 3], [2, 4]]
    assert table.columns == ("a", "b")
    assert table.domain_names == ("x", "y")
    assert table.official.tolist() == [0, 1]

    mixed = {"age": [1.0, 2.0], "job": ["x", "y"], "label": [0, 1]}
    with refused("its columns are age, job: one of images, all of text"):
        saved_and_read(mixed)
    assert saved_and_read(mixed, drop="job").columns == ("age",)
    paths = {"image": ["a.png", "b.png"], "label": [0, 1]}
    with refused(r"'image' names files of images; cast_column\('image'"):
        saved_and_read(paths)

    kinds = datasets.Features(
        a=datasets.Value("float32"), label=datasets.ClassLabel(names=["1", "2", "3"])
    )
    grades = datasets.Dataset.from_dict({"a": [1.0, 2.0], "label": [1, 2]}, features=kinds)
    grades.save_to_disk(tmp_path / "grades")
    for classes in ("", "1,2,3"):  # no sample has the first of them
        assert read_dataset("hf:grades", tmp_path, classes=classes).labels.tolist() == [1, 2]

    gap = {"a": [1.0, None, 1.0], "c": [3, 4, 3], "v": [[1, 2]] * 3, "label": [5, 7, 5]}
    filled = saved_and_read(gap, impute="mean")
    assert np.isnan(filled.inputs).sum() == 1
    assert filled.columns == ()
    assert "column 'c' says the label in other words; drop it" in capsys.readouterr().err
    assert filled.contents.shape == (3, 0)  # settings have a say in the inputs
    with refused("column 'a' has numbers written as texts; cast_column"):
        saved_and_read({"a": ["1.5", "2.5"], "label": [0, 1]})
    with refused("sample 1 has no text in column 'text'"):
        saved_and_read({"text": ["good", None], "label": [0, 1]})


def test_an_image_of_hugging_face_that_cannot_be_read_is_named(read_dataset, tmp_path):
    datasets = pytest.importorskip("datasets")
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    good = Image.new("RGB", (8, 8))
    for wrong, said in ((None, "there is none"), ({"bytes": b"x"}, "cannot identify image file")):
        columns = {"image": [good, wrong], "label": [0, 1]}
        datasets.Dataset.from_dict(columns, features=kinds).save_to_disk(tmp_path / "photos")
        with refused(rf"the image of sample 1, column 'image', cannot be read \({said}"):
            read_dataset("hf:photos", tmp_path)


@pytest.mark.usefixtures("reviews")
def test_a_folder_of_hugging_face_is_one_in_data_dir(read_dataset, tmp_path):
    """The folder ``reviews`` lies beside ``table``, so no path from there may lead to it."""
    (tmp_path / "table").mkdir()

    with refused("there is no folder 'none' in data-dir"):
        read_dataset("hf:none", tmp_path)
    for outside in ("../reviews", str(tmp_path / "reviews")):
        with refused("there is no folder"):
            read_dataset(f"hf:{outside}", tmp_path / "table")


def test_a_copy_that_a_killed_process_leaves_is_listed(
    reviews, read_dataset, tmp_path, monkeypatch
):
    """Reading makes a copy for Hugging Face's library; the command that lists a site's data has it.

    Here the copy is not opened but noted, and made again after the reader has removed it.
    """
    copies = []
    monkeypatch.setattr(
        "protofl_common.data.own._opened", lambda *words: copies.append(Path(words[-1]))
    )
    with refused("cannot be read"):
        read_dataset("hf:reviews", tmp_path, text_length=2)

    (copy,) = copies
    copy.mkdir()
    try:
        stored = stored_at({"site-name": "north", "cache-dir": str(copy.parent)})
        assert copy in stored[-1].paths
    finally:
        copy.rmdir()
