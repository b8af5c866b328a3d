"""Data of the user's own: manifests, arrays, texts, functions, Hugging Face folders; and errors that say where."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unicodedata import normalize
from zipfile import ZipFile

import numpy as np
import pytest
from PIL import Image

from protofl_common.config.architectures import VOCABULARY
from protofl_common.config.options import SettingsError
from protofl_common.config.python_names import allow
from protofl_common.data import ClientData, DataError, open_client_data
from protofl_common.data.own import tokens
from protofl_common.data.raw import from_arrays
from protofl_common.data.store import data_key, open_data
from protofl_common.experiment.node import NodeConfig
from protofl_common.experiment.settings import Settings, default_run_config
from protofl_common.tools.site.stored import stored_at
from tests.support.given import Patch, Printed
from tests.unit.protofl_common.data.conftest import MakeSettings, OpenAll

TABLE = """age,label,dose,client,split
1,sick,2.5,north,train
2,well,3,north,test
3,sick,4,south,train
4,well,5,south,test
"""


@pytest.fixture
def divided(open_all: OpenAll, tmp_path: Path) -> Any:
    """``divided(2, text)``: what each of two clients has of the table of a file with these lines."""

    def open_(clients: int, text: str, **settings: Any) -> list[ClientData]:
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.csv"
        file.write_text(text)
        whole = {
            "dataset": "arrays",
            "data_dir": str(file),
            "partition": "natural",
            "train_samples": 0,
        }
        return open_all(clients, **whole | settings)

    return open_


def test_a_table_of_numbers_with_its_own_clients_and_split(opened: Any) -> None:
    data = opened(
        "arrays", "a.csv", TABLE.replace("sick,", " sick ,", 1).replace(",north,", ", north,", 1)
    )
    assert data.inputs.dtype == np.float32
    assert data.inputs.tolist() == [[1, 2.5], [2, 3], [3, 4], [4, 5]]
    assert (data.classes, data.labels.tolist()) == (("sick", "well"), [0, 1, 0, 1])
    assert (data.domain_names, data.domains.tolist()) == (("north", "south"), [0, 0, 1, 1])
    assert data.official.tolist() == [0, 1, 0, 1]
    assert data.mean == (2.0, 3.25)  # of the training samples
    assert opened("arrays", "b.csv", TABLE, classes="well,sick").labels.tolist() == [1, 0, 1, 0]


def test_the_users_clients_and_split_are_respected(
    divided: Any, data_settings: MakeSettings, tmp_path: Path
) -> None:
    north, south = divided(2, TABLE, test_from="official-own")
    assert (north.domain, south.domain) == ("north", "south")
    assert (north.train_inputs.tolist(), north.test_inputs.tolist()) == ([[1, 2.5]], [[2, 3]])
    assert south.test_labels.tolist() == [1]
    with pytest.raises(DataError, match="the data name 2 clients, not 1"):
        divided(1, TABLE, test_from="official-own")
    with pytest.raises(
        DataError, match="test-from = 'official-own': a client has 2 training and 0 test samples"
    ):
        divided(2, TABLE.replace("south,test", "south,train"), test_from="official-own")
    own = {
        "dataset": "arrays",
        "data_dir": f"{tmp_path}/0.csv",
        "partition": "natural",
        "test_from": "official-own",
    }
    alone = open_client_data(
        data_settings(**own), seed=1, partition=0, num_partitions=1, domain="south"
    )
    assert alone.train_inputs.tolist() == [[3, 4]]


@pytest.mark.parametrize("patients", [40, 6, 3, 2])
def test_at_a_site_no_patient_is_both_for_training_and_for_testing(
    patients: int, divided: Any
) -> None:
    """Of those who have a rare class some are for testing, whatever they have beside it."""
    rows = [
        f"{row % patients},{'ab'[row % patients % 5 == 0 and row > 200]},P{row % patients}"
        for row in range(400)
    ]
    text, capped = (
        "\n".join(["x,label,client", *rows, ""]),
        {"train_samples": 90, "validation_fraction": 0.25},
    )
    (site,) = divided(1, text, partition="own", **capped)
    parts = [
        set(part.ravel().tolist())
        for part in (site.train_inputs, site.test_inputs, site.validation_inputs)
    ]
    assert (
        len(set.union(*parts)) == sum(map(len, parts)) >= patients - 2
    )  # whom the cap on training leaves out
    assert [bool(part) for part in parts] == [True, True, patients > 3]
    assert (set(site.train_labels.tolist()), site.domain) == ({0, 1}, "")
    assert set(site.test_labels.tolist()) == {0, patients > 3}
    often = "".join(f"{n},{label},P{n}\n" for n in range(1, 6) for label in ("a", f"r{n}"))
    (site,) = divided(1, f"x,label,client\n0,a,P0\n{often}", partition="own")
    assert site.test_inputs.tolist() == [[0]], "others have the last samples of a class"
    few = "x,label,client\n0,a,P0\n0,c,P0\n1,b,P1\n1,c,P1\n2,a,P2\n3,b,P3\n"
    assert all(
        2 in divided(1, few, partition="own", seed=seed)[0].train_labels for seed in range(9)
    )


@pytest.mark.parametrize(
    "partition", ["own", "iid", "dirichlet", "pathological", "n-way-k-shot", "label-shift"]
)
@pytest.mark.parametrize("test_from", ["split", "balanced"])
def test_no_patient_is_trained_on_and_tested_by_anybody(
    partition: str, test_from: str, divided: Any
) -> None:
    """Nor validated, though one has half of all samples; a scanner is both. All of many have a test patient."""
    rows = [
        f"{max(0, row - 300) // 2},{'ab'[row % 2]},{max(0, row - 300) // 2}" for row in range(600)
    ]
    same = {
        "partition": partition,
        "test_from": test_from,
        "ways": 2,
        "ways_stdev": 0,
        "shots": 30,
        "alpha": 9.0,
    }
    for column in ("domain", "client"):
        text, tenth = "\n".join([f"x,label,{column}", *rows, ""]), {"validation_fraction": 0.1}
        parts = [
            (of.train_inputs, of.test_inputs, of.validation_inputs)
            for of in divided(3, text, **same, **tenth)
        ]
        train, test, chosen = map(np.concatenate, zip(*parts, strict=True))
        assert np.isin(test, train).any() == np.isin(chosen, train).any() == (column == "domain")
        if test_from == "split" and partition != "pathological":
            assert 0.22 < len(test) / (len(train) + len(chosen) + len(test)) < 0.28
    assert all(
        divided(20, text, **same | {"alpha": 0.1}, seed=i)
        for i in range(4 * (partition == "dirichlet"))
    )


@pytest.mark.parametrize(
    "partition", ["iid", "dirichlet", "balanced-dirichlet", "pathological", "label-shift"]
)
def test_a_test_part_at_the_end_of_the_file_is_divided_as_the_rest(
    partition: str, divided: Any
) -> None:
    rows = [f"{row},{row % 2},{'test' if row >= 300 else 'train'}" for row in range(400)]
    text = "\n".join(["x,label,split", *rows, ""])
    clients = divided(4, text, partition=partition, test_from="official-own", alpha=5.0)
    for client in clients:
        assert (
            0.1
            < len(client.test_labels) / (len(client.train_labels) + len(client.test_labels))
            < 0.45
        )
    assert sum(len(client.test_labels) for client in clients) == 100


MARKED = TABLE.replace("4,well", "9,well,7,north,validation\n8,sick,7,south,validation\n4,well")
MARKED += "5,sick,1,south,train\n"


@pytest.mark.parametrize("test_from", ["official-own", "split"])
@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_a_part_marked_for_validation_is_used_as_it_stands(
    test_from: str, fraction: float, divided: Any
) -> None:
    """By each client its own rows, whatever the fraction and the rest of the split."""
    found = divided(2, MARKED, test_from=test_from, validation_fraction=fraction)
    assert [client.validation_inputs[:, 0].tolist() for client in found] == [[9], [8]]
    for client, train, test in zip(found, ([1], [3, 5]), ([2], [4]), strict=True):
        left = sorted(
            row[0] for row in (*client.train_inputs.tolist(), *client.test_inputs.tolist())
        )
        assert left == sorted([*train, *test])
        if test_from == "official-own":
            assert sorted(client.train_inputs[:, 0].tolist()) == train


def test_the_marked_validation_part_is_common_with_the_test_part_and_never_tested_on(
    divided: Any,
) -> None:
    everybody = divided(2, MARKED, test_from="official-all")
    assert [client.validation_inputs[:, 0].tolist() for client in everybody] == [[9, 8], [9, 8]]
    with pytest.raises(
        DataError, match="no sample of classes sick"
    ):  # nor are validation samples of others used
        divided(2, MARKED, test_from="official")
    numbers = iter(range(100))
    rows = [
        f"{next(numbers)},{label},{next(numbers)},{client},{part}\n"
        for client in ("north", "south")
        for label in ("well", "sick")
        for part in ("train", "train", "test", "test", "validation")
    ]
    found = divided(
        2,
        TABLE.splitlines(keepends=True)[0] + "".join(rows),
        test_from="balanced",
        train_fraction=0.75,
    )
    for first, client in zip((0, 20), found, strict=True):
        assert client.validation_inputs[:, 0].tolist() == [first + 8, first + 18]
        assert sorted(client.test_labels.tolist()) == [0, 1]
        used = [row[0] for row in (*client.train_inputs.tolist(), *client.test_inputs.tolist())]
        assert sorted(used) == [first + number for number in (0, 2, 4, 6, 10, 12, 14, 16)]


def test_no_shot_is_marked_for_validation(divided: Any) -> None:
    rows = [f"{number},{'abc'[number % 3]},{number},x,train\n" for number in range(60)]
    marked = [f"{100 + number},{'abc'[number % 3]},0,x,validation\n" for number in range(60)]
    text = TABLE.splitlines(keepends=True)[0] + "".join(rows + marked)
    few = {"partition": "n-way-k-shot", "ways": 2, "ways_stdev": 0, "shots": 3}
    for client in divided(4, text, train_fraction=0.5, **few):
        held = set(client.train_labels.tolist())
        assert (len(held), len(client.train_labels), len(client.test_labels)) == (2, 6, 6)
        assert (np.concatenate([client.train_inputs, client.test_inputs])[:, 0] < 60).all()
        wanted = [
            100 + number for number in range(60) if number % 3 in held
        ]  # as test-from = official has it
        assert client.validation_inputs[:, 0].tolist() == wanted


def test_arrays_of_every_kind(opened: Any) -> None:
    labels = [0, 1, 1]
    images = opened(
        "arrays", "i.npz", {"inputs": np.zeros((3, 1, 9, 9), np.uint8), "labels": labels}
    )
    assert images.inputs.dtype == np.uint8
    signal = opened(
        "arrays",
        "s.npz",
        {"inputs": np.ones((3, 2, 5)), "labels": labels, "client": ["a", "b", "b"]},
    )
    assert (signal.inputs.dtype, len(signal.mean), signal.domain_names) == (
        np.float32,
        2,
        ("a", "b"),
    )
    words = opened(
        "arrays",
        "t.npz",
        {"inputs": np.ones((3, 4), np.int32), "labels": labels, "classes": ["x", "y"]},
    )
    assert (words.inputs.dtype, words.mean, words.classes) == (np.int64, (), ("x", "y"))
    parts = {
        f"x_{part}": np.full((2, 3), float(i))
        for i, part in enumerate(("train", "test", "validation"))
    }
    parts |= {f"y_{part[2:]}": np.arange(2) for part in parts} | {"x_mean": np.zeros(3)}
    data = opened("arrays", "a.npz", parts)
    assert data.official.tolist() == [0, 0, 1, 1, 2, 2]
    assert data.mean == (0.0, 0.0, 0.0)  # of the training samples
    with pytest.raises(DataError, match=r"'x_val' is of no part train, test or validation"):
        opened("arrays", "v.npz", parts | {"x_val": np.eye(2), "y_val": np.arange(2)})


def test_files_that_are_no_arrays_as_they_say(
    opened: Any, data_settings: MakeSettings, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="the parts train, test differ in shape"):
        opened(
            "arrays",
            "p.npz",
            {"x_train": np.eye(2), "y_train": [0, 1], "x_test": np.eye(3), "y_test": [1, 0, 1]},
        )
    np.savez(tmp_path / "odd.npz", inputs=np.array([[1.0], [1.0, 2.0]], object), labels=[0, 1])
    np.save(tmp_path / "one.npy", np.eye(2))
    (tmp_path / "one.npy").rename(tmp_path / "one.npz")
    np.savez_compressed(
        tmp_path / "torn.npz", inputs=np.zeros((600, 40)), labels=np.zeros(600, int)
    )
    torn = bytearray((tmp_path / "torn.npz").read_bytes())
    torn[120:130] = b"\xff" * 10
    (tmp_path / "torn.npz").write_bytes(torn)
    several = "several: odd.npz, one.npz, p.npz, torn.npz; name one"
    for name in ("odd.npz", "one.npz", "torn.npz", ""):
        said = (
            f"{name} cannot be read as plain NumPy arrays, series of one length"
            if name
            else several
        )
        with pytest.raises(DataError, match=said):
            open_data(data_settings(dataset="arrays", data_dir=str(tmp_path / name)))


def test_a_manifest_whose_images_may_change_elsewhere(
    opened: Any, data_settings: MakeSettings, tmp_path: Path
) -> None:
    (tmp_path / "scans").mkdir()
    for name in ("a.png", "scans/b.png"):
        Image.fromarray(np.full((5, 7), 90, np.uint8)).save(tmp_path / name)
    text = "file,label,client,split\na.png,cat,north,train\nscans/b.png,dog,south,test\n"
    data = opened("manifest", "list.csv", text, image_size=8)
    assert (data.inputs.shape, data.classes, data.official.tolist()) == (
        (2, 3, 8, 8),
        ("cat", "dog"),
        [0, 1],
    )
    with pytest.raises(
        DataError, match=r"list2\.csv, line 2, column 'file': there is no file 'none\.png'"
    ):
        opened("manifest", "list2.csv", "file,label\nnone.png,cat\n")
    with pytest.raises(
        DataError, match="line 3 has split 'later'; must be train, validation or test"
    ):
        opened("manifest", "list3.csv", "file,label,split\na.png,cat,test\na.png,cat,later\n")
    with pytest.raises(
        DataError, match=r"list4\.csv, line 2 and line 4: image 'scans/\.\./a\.png' has two labels"
    ):
        opened("manifest", "list4.csv", "file,label\na.png,cat\na.png,cat\nscans/../a.png,dog\n")
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "a.csv").write_text("file,label\n../scans/a.png,x\n../scans/b.png,y\n")
    settings, seen = (
        data_settings(dataset="manifest", data_dir=str(tmp_path / "lists"), image_size=8),
        [],
    )
    for grey, width in ((10, 8), (99, 16)):
        Image.fromarray(np.full((8, width), grey, np.uint8)).save(tmp_path / "scans" / "a.png")
        data_key.cache_clear()
        seen.append(int(open_data(settings).inputs[0].max()))
    assert seen == [10, 99]


@pytest.mark.parametrize(("contents", "said"), [
    ("a,b\n1,2\n", "has no column 'label'; its columns: a, b"),
    ("a;label\n1,5;x\n", "columns are separated by ';'; save it with ',', and numbers with a point"),
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
    ("a,label\n1,sick\n2,well\n3,Sick\n4,NA\n5,none\n", "labels 'NA', 'Sick', 'sick' are alike .*, or stand for none"),
    ("a,Client,label\n0,1,x\n1,2,y\n", "column 'Client' would be an input; call it 'client', or drop it"),
])  # fmt: skip
def test_a_wrong_table_is_named_by_line_column_and_value(
    opened: Any, contents: str, said: str
) -> None:
    with pytest.raises(DataError, match=said):
        opened("arrays", "wrong.csv", contents)


def test_what_data_cannot_serve_for_is_said(opened: Any, open_all: OpenAll, divided: Any) -> None:
    with pytest.raises(DataError, match="dataset 'wine' has no domains"):
        open_all(2, dataset="wine", partition="natural")
    with pytest.raises(
        DataError, match=r"image-size = 8: only images can be resized; a sample is float32 \[13\]"
    ):
        open_all(2, dataset="wine", partition="iid", image_size=8)
    with pytest.raises(
        DataError, match=r"line 3 has the label 'well', which is none of classes = 'sick,dead'"
    ):
        opened("arrays", "a.csv", TABLE, classes="sick,dead")
    with pytest.raises(
        DataError,
        match=r"a client has 2 training and 0 test samples; .* or of one `client`, or use",
    ):
        divided(1, "x,label,client\n1,a,P1\n2,b,P2\n", partition="own")
    text = "a,label\n" + "".join(
        f"{number},{number}\n" for number in range(9)
    )  # a sample of each class
    with pytest.raises(DataError, match=r"a client has \d training and \d test samples"):
        divided(2, text, partition="n-way-k-shot")


@pytest.mark.parametrize(("arrays", "said"), [
    ({"labels": [1]}, "has no 'inputs', only 'labels'"),
    ({"inputs": np.zeros((2, 3)), "labels": [1]}, r"labels has shape \[1\]; there are 2 inputs"),
    ({"inputs": np.zeros(3), "labels": [1, 2, 3]}, r"inputs are float64 \[3\], not numbers"),
    ({"inputs": np.zeros((2, 0)), "labels": [1, 2]}, r"inputs are float64 \[2, 0\], not numbers"),
    ({"inputs": np.array([["a"]]), "labels": [1]}, "inputs are <U1"),
    ({"inputs": [[1.0], [1.0, 2.0]], "labels": [1, 2]}, "inputs differ in shape"),
    ({"inputs": np.zeros((2, 3), np.uint8), "labels": [1, 2]}, "bytes must be images .*; give numbers as float"),
    ({"inputs": np.zeros((2, 8, 8, 3), np.uint8), "labels": [1, 2]}, "the channels first"),
    ({"inputs": np.zeros((2, 1, 8, 8), np.uint16), "labels": [1, 2]}, r"inputs are uint16 \[2, 1, 8, 8\]: .*floating"),
    ({"inputs": np.array([[1, -1]]), "labels": [1]}, "sample 0 has a token below 0"),
    ({"inputs": np.array([[1.0, np.inf]]), "labels": [1]}, r"sample 0 has inf at \[1\]"),
    ({"inputs": np.ones((1, 2)), "labels": [2], "classes": ["a", "b"]}, "the label '2', which is none of classes"),
    ({"inputs": np.ones((1, 2)), "labels": None}, "has no 'labels'"),
    ({"inputs": np.ones((2, 2)), "labels": [1.0, np.nan]}, r"sample 1 has no label \(nan; 1 in all\)"),
    ({"inputs": np.ones((2, 2)), "labels": np.array([1, None])}, "sample 1 has no label"),
    ({"inputs": np.ones((1, 2)), "labels": [0], "classes": "ab"}, "classes = 'ab': must be different names"),
    ({"inputs": np.ones((1, 2)), "labels": [0], "classes": ["a", "a"]}, "must be different names"),
])  # fmt: skip
def test_wrong_arrays_are_refused(arrays: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        from_arrays(arrays, "here")


def test_labels_are_names_or_indices() -> None:
    def labels(given: Any, setting: str = "", **more: Any) -> tuple[Any, ...]:
        data = from_arrays(
            {"inputs": np.ones((len(given), 1)), "labels": given} | more, "here", setting
        )
        return data.labels.tolist(), data.classes

    assert labels([3, 10, 3]) == ([0, 1, 0], ("3", "10"))
    assert labels([1.0, 2.0]) == ([0, 1], ("1", "2"))
    assert labels([1, 0], "no,yes") == ([1, 0], ("no", "yes"))
    assert labels([1, 2], "1,2,3") == ([0, 1], ("1", "2", "3"))
    assert labels([1, 2], "1,2,other") == ([0, 1], ("1", "2", "other"))  # a site without others
    assert labels([-1, 1], "-1,1") == ([0, 1], ("-1", "1"))
    assert labels(np.array([True, False]), "True,False") == ([0, 1], ("True", "False"))
    assert labels([0, 1], classes=["1", "2"]) == ([0, 1], ("1", "2"))
    assert labels(["b", "a"]) == ([1, 0], ("a", "b"))
    assert labels(["b", "a"], classes=None) == ([1, 0], ("a", "b"))


def test_names_as_macos_writes_them_are_those_of_others(opened: Any) -> None:
    """Its file names, and what is copied from them, have an umlaut as two characters (NFD)."""
    text = "größe,art,label,client\n1,süß,bösartig,Köln\n2,herb,gut,Köln\n"
    mixed = normalize("NFD", text) + text.partition("\n")[2]
    for form in ("NFC", "NFD"):
        names = {"classes": "gut,bösartig", "columns": "größe,art", "one_hot": "art:süß|herb"}
        data = opened(
            "arrays",
            "a.csv",
            mixed,
            **{key: normalize(form, value) for key, value in names.items()},
        )
        assert (data.classes, data.domain_names) == (("gut", "bösartig"), ("Köln",))
        assert (data.labels.tolist(), data.columns) == ([1, 0, 1, 0], ("größe", "art:süß|herb"))
        assert data.inputs.tolist() == [[1, 1, 0], [2, 0, 1], [1, 1, 0], [2, 0, 1]]
    assert opened("arrays", "b.csv", mixed, one_hot=names["one_hot"]).classes == ("bösartig", "gut")
    assert (
        NodeConfig.of({"site-name": "north", "domain": normalize("NFD", "Köln")}).domain == "Köln"
    )
    asked = Settings.from_run_config(
        default_run_config() | {"new-domain": normalize("NFD", "Köln")}
    )
    assert asked.federation.new_domain == "Köln"


def test_texts_with_and_without_a_header_as_tokens(
    opened: Any, data_settings: MakeSettings, tmp_path: Path
) -> None:
    """crc32("a") = 3904355907."""
    news = opened(
        "text-csv", "news.csv", '"3","Fears, again","The end"\n"1","Good","news"\n', text_length=4
    )
    assert (news.classes, news.columns) == (
        ("1", "3"),
        (),
    )  # a file to predict need not call them as we do
    assert news.inputs.tolist() == tokens(["fears , again the", "GOOD NEWS"], 4).tolist()
    assert news.inputs[1, 2:].tolist() == [0, 0]
    with pytest.raises(
        DataError, match="categories, of over 200 letters, or with a line break"
    ):  # of no model
        opened("text-csv", "long.csv", f"label,{'why ' * 51}\nx,one\ny,two\n")
    with pytest.raises(DataError, match="has no column 'label', only category, text"):
        opened("text-csv", "odd.csv", "category,text\nsport,one\nsport,two\n")
    (folder := tmp_path / "both").mkdir()
    (folder / "train.csv").write_text("label,text\nx,one\ny,two\n")
    (folder / "test.csv").write_text("label,text\ny,three\n")
    both = open_data(data_settings(dataset="text-csv", data_dir=str(folder)))
    assert (both.official.tolist(), both.labels.tolist(), both.columns) == (
        [1, 0, 0],
        [1, 0, 1],
        ("text",),
    )
    for wrong, said in (
        ("label,title,text\nx,a,one\ny,b,two\n", "only one of its files has a column title"),
        ("label,text,client\nx,one,a\ny,two,b\n", "only one of its files has a column client"),
    ):
        (folder / "train.csv").write_text(wrong)
        data_key.cache_clear()
        with pytest.raises(DataError, match=said):
            open_data(data_settings(dataset="text-csv", data_dir=str(folder)))
    with pytest.raises(DataError, match="'label_text' says the label in other words"):
        opened("text-csv", "l.csv", "label,text,label_text\n0,one,bad\n1,two,good\n0,three,bad\n")
    (folder / "train.csv").write_text("label,text,by,split\nx,one,a,train\ny,two,b,validation\n")
    (folder / "test.csv").write_text(
        "label,text,by,split\ny,three,a,test\nx,four,b,test\nx,five,b,test\n"
    )
    data_key.cache_clear()  # of three test texts, who wrote one says its label, by chance
    assert open_data(data_settings(dataset="text-csv", data_dir=str(folder))).official.tolist() == [
        1,
        1,
        1,
        0,
        2,
    ]
    assert tokens(["A a", ""], 3).tolist() == [
        [1 + 3904355907 % (VOCABULARY - 1)] * 2 + [0],
        [0, 0, 0],
    ]


OWN = """
import numpy as np
class Thing:
    inputs, labels, client = np.eye(4), [0, 1, 0, 1], ["a", "a", "b", "b"]
def load(data_dir):
    return vars(Thing) if data_dir == "" else 1 / 0
def thing(data_dir):
    return Thing()
def nothing(data_dir):
    return 3
def misspelt(data_dir):
    return {**vars(Thing), "spilt": ["train"] * 4}
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    allow([name, "no_such_module"])
    return name


def test_a_function_of_the_users_own(
    own_module: str, data_settings: MakeSettings, tmp_path: Path
) -> None:
    for function in ("load", "thing"):
        data = open_data(data_settings(dataset=f"{own_module}:{function}"))
        assert data.inputs.tolist() == np.eye(4).tolist()
        assert data.domain_names == ("a", "b")
    for name, kind, said in (
        (
            f"{own_module}:absent",
            SettingsError,
            f"dataset = '{own_module}:absent': {own_module} has no absent",
        ),
        (
            "no_such_module:load",
            SettingsError,
            "no_such_module cannot be imported .*put its folder on PYTHONPATH",
        ),
        (f"{own_module}:nothing", DataError, "returned int, not a dictionary of arrays"),
        (
            f"{own_module}:misspelt",
            DataError,
            "returned 'spilt'; choose among inputs, labels, client, split, classes",
        ),
    ):
        with pytest.raises(kind, match=said):
            open_data(data_settings(dataset=name))
    with pytest.raises(DataError, match=r"it failed \(ZeroDivisionError"):
        open_data(data_settings(dataset=f"{own_module}:load", data_dir=str(tmp_path)))


def test_data_of_edited_code_are_read_again(
    data_settings: MakeSettings, tmp_path: Path, monkeypatch: Patch
) -> None:
    (package := tmp_path / "pack_age").mkdir()
    (package / "load.py").write_text(
        "from pack_age.more import *\ndef load(_): return dict(inputs=X, labels=[0, 1])"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    allow(["pack_age", "note_book", "in_zip"])
    for number in (1.0, 12.0):
        (package / "more.py").write_text(f"X = [[{number}], [3.0]]")
        data_key.cache_clear()
        assert open_data(data_settings(dataset="pack_age.load:load")).inputs[0].tolist() == [number]
        for module in [name for name in sys.modules if name.startswith("pack_age")]:
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "note_book", notebook := ModuleType("note_book"))
    exec("def load(data_dir): ...", vars(notebook))
    with ZipFile(tmp_path / "code.zip", "w") as archive:
        archive.writestr("in_zip.py", "def load(data_dir): ...")
    monkeypatch.syspath_prepend(tmp_path / "code.zip")
    for name in ("note_book", "in_zip"):
        with pytest.raises(
            DataError, match=f"dataset = '{name}:load': stands in no file, as in a notebook"
        ):
            open_data(data_settings(dataset=f"{name}:load"))


def test_a_folder_of_hugging_face(
    data_settings: MakeSettings, tmp_path: Path, monkeypatch: Patch, capsys: Printed
) -> None:
    datasets = pytest.importorskip("datasets")
    label = datasets.ClassLabel(names=["bad", "good"])
    kinds = datasets.Features(
        {"title": datasets.Value("string"), "text": datasets.Value("string"), "label": label}
    )
    texts = {"title": ["so", "so"], "text": ["bad", "good"]}
    part, test = (
        datasets.Dataset.from_dict(texts | {"label": of}, features=kinds) for of in ([0, 1], [1, 1])
    )
    datasets.DatasetDict({"train_valley": part, "test": test}).save_to_disk(tmp_path / "reviews")
    data = open_data(data_settings(dataset="hf:reviews", data_dir=str(tmp_path), text_length=3))
    assert (data.classes, data.columns) == (
        ("bad", "good"),
        ("title", "text"),
    )  # a run's first lines name the columns
    assert data.official.tolist() == [0, 0, 1, 1]
    assert data.inputs.tolist() == tokens(["so bad", "so good"] * 2, 3).tolist()
    named, other = (
        part.add_column("label_text", ["0", "1"]),
        test.add_column("label_text", ["1", "1"]),
    )
    wrong = [({name: part}, f"part '{name}'") for name in ("test_matched", "Val")]
    for parts, said in (
        *wrong,
        ({"a": named, "b": other}, "'label_text' says the label in other words"),
    ):
        datasets.DatasetDict(parts).save_to_disk(tmp_path / "wrong")
        with pytest.raises(DataError, match=said):
            open_data(data_settings(dataset="hf:wrong", data_dir=str(tmp_path)))
    columns = {
        "a": [1.0, 2.0],
        "b": [3.0, 4.0],
        "label": [5, 7],
        "client": ["x", "y"],
        "domain": ["u", "u"],
    }
    columns["split"] = ["train", "test"]
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "table")
    table = open_data(data_settings(dataset="hf:table", data_dir=str(tmp_path)))
    assert (table.inputs.tolist(), table.columns) == ([[1, 3], [2, 4]], ("a", "b"))
    assert (table.domain_names, table.official.tolist()) == (("x", "y"), [0, 1])
    columns = {"a": [1.0, None, 1.0], "c": [3, 4, 3], "v": [[1, 2]] * 3, "label": [5, 7, 5]}
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "gaps")
    gaps = open_data(data_settings(dataset="hf:gaps", data_dir=str(tmp_path), impute="mean"))
    assert (np.isnan(gaps.inputs).sum(), gaps.columns) == (1, ())
    assert "column 'c' says the label in other words; drop it" in capsys.readouterr().err
    with pytest.raises(DataError, match="there is no folder 'none' in data-dir"):
        open_data(data_settings(dataset="hf:none", data_dir=str(tmp_path)))
    for outside in ("../reviews", str(tmp_path / "reviews")):
        with pytest.raises(DataError, match="there is no folder"):
            open_data(data_settings(dataset=f"hf:{outside}", data_dir=str(tmp_path / "table")))
    copies: list[Path] = []
    monkeypatch.setattr(
        "protofl_common.data.own._opened", lambda *words: copies.append(Path(words[-1]))
    )
    with pytest.raises(DataError, match="cannot be read"):
        open_data(data_settings(dataset="hf:reviews", data_dir=str(tmp_path), text_length=2))
    copies[0].mkdir()  # as a process that was killed leaves it
    assert (
        copies[0] in stored_at({"site-name": "north", "cache-dir": str(copies[0].parent)})[-1].paths
    )
    copies[0].rmdir()
