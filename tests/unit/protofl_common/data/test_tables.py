"""Tables of the user's own: bad columns, categories, gaps, and what values are fitted on."""

from functools import partial

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from protofl_common.data import DataError
from protofl_common.data.door import from_arrays
from protofl_common.data.raw import normalised
from protofl_common.data.table import read_columns
from tests.unit.protofl_common.data.conftest import refused

MESSY = """id,admitted,sex,age,chol,client,label
P1,2021-03-04,f,40,,north,sick
P2,2021-03-05,m,50,180,north,well
P3,2021-03-06,,60,?,south,sick
P4,2021-03-07,m,70,200,south,well
P5,2021-03-08,f,80,220,south,well
"""
CLEAN = {"drop": "id,admitted", "one_hot": "sex:f|m", "impute": "median"}


@pytest.fixture
def write_and_read(write_and_read):
    """``write_and_read(text)``: write these lines into ``t.csv``, and return the table."""
    return partial(write_and_read, "arrays", "t.csv")


def test_every_bad_column_is_in_one_message_with_what_to_do(write_and_read):
    """Four of five columns are bad; the last line has a cure for all."""
    with pytest.raises(DataError) as caught:
        write_and_read(MESSY)
    first, *lines, last = str(caught.value).splitlines()
    assert first.endswith("t.csv: 4 columns cannot be used as they are")
    bad_columns = [f"line 2, column '{name}'" for name in ("id", "admitted", "sex", "chol")]
    assert [line.split(":")[0].strip() for line in lines] == bad_columns
    assert "'2021-03-04' is not a finite number but a date" in lines[1]
    why = "'f' is not a finite number but text; name its categories (4 of 5 values)"
    assert lines[2].endswith(f'{why}: one-hot="sex:f|m"')
    assert "'' is not a finite number but a gap" in lines[3]
    assert '(2 of 5 values): impute="median"' in lines[3]
    assert last.strip() == 'all: drop="id,admitted" one-hot="sex:f|m" impute="median"'


def test_no_cure_is_named_for_gaps_that_are_filled_in_already(write_and_read):
    """The column has a text and a gap; `impute=mean` of the user is not to become `median`."""
    with pytest.raises(DataError) as caught:
        write_and_read("age,label\nold,sick\n,well\n60,sick\n70,well\n", impute="mean")

    assert "line 2, column 'age': 'old'" in str(caught.value)
    assert "impute" not in str(caught.value)


def test_with_what_the_last_line_says_the_table_can_be_used(write_and_read):
    assert write_and_read(MESSY, **CLEAN).columns == ("sex:f|m", "age", "chol")


def test_a_minus_is_a_gap_unless_it_is_the_result_of_a_test(write_and_read):
    table = "a,b,label\n+,1,x\n-,-,y\n+,3,x\n-,4,y\n"
    with refused(r'name its categories \(4 of 4 values\): one-hot="a:\+\|-"'):
        write_and_read(table, impute="mean")
    data = write_and_read(table, impute="mean", one_hot="a:+|-")
    assert data.inputs[0].tolist() == [1, 0, 1]
    assert np.isnan(data.inputs[1]).tolist() == [False, False, True]


def test_categories_are_columns_of_zero_and_one_and_gaps_stay_open(write_and_read):
    """A gap in a category is 0 in all its columns; one in a number is NaN until it is filled."""
    data = write_and_read(MESSY, **CLEAN)
    sexes = [[1, 0], [0, 1], [0, 0], [0, 1], [1, 0]]  # f, m, a gap, m, f
    assert data.inputs[:, :2].tolist() == sexes
    assert data.inputs[:, 2].tolist() == [40, 50, 60, 70, 80]
    assert np.isnan(data.inputs[:, 3]).tolist() == [True, False, True, False, False]

    of_another_order = write_and_read(MESSY, columns="age, sex", one_hot="sex:m|f", impute="mean")
    assert of_another_order.inputs[0].tolist() == [40, 0, 1]


def test_categories_that_are_numbers_may_be_spelt_as_any_number():
    columns = {"cp": ["1", "1.0", "2", " 2"]}
    inputs = read_columns(columns, ["cp:1|2"], "here", "line {}".format, gaps=False)
    assert inputs.argmax(axis=1).tolist() == [0, 0, 1, 1]


def test_a_column_whose_samples_lose_what_tells_them_apart_is_named(write_and_read, capsys):
    """A model gets float32, in which 2²⁴ and 2²⁴ + 1 are one number.

    A column that says the label in other words is named too.
    """
    text = "id,amount,same,coded,gone,label\n"
    for row in range(60):
        label = row % 2
        text += f"{16777216 + row},{1e9 + 1e7 * row},0.1,{label + 3},{label},{label}\n"

    data = write_and_read(text, drop="gone")

    assert data.inputs[1, 0] == 16777216
    first, second = capsys.readouterr().err.splitlines()
    assert "line 3, column 'id': 16777217 is 16777216 to a model" in first
    said = "column 'coded' says the label in other words; drop it"
    assert f"{said}, unless it is known before the label" in second


@pytest.mark.parametrize(("settings", "said"), [
    (
        CLEAN | {"one_hot": "sex:m|d"},
        "line 2, column 'sex': 'f' is none of the categories in one-hot",
    ),
    (
        CLEAN | {"impute": "none", "drop": "id,admitted,chol"},
        "line 4, column 'sex': '' is not a finite number",
    ),
    (
        CLEAN | {"drop": "id,admited"},
        "drop: .* has no column 'admited' for the inputs; those are: id, admitted",
    ),
    (CLEAN | {"columns": "age"}, "one-hot: .* has no column 'sex' for the inputs; those are: age"),
    (CLEAN | {"columns": "age,label"}, "columns: .* has no column 'label' for the inputs"),
])  # fmt: skip
def test_what_no_definition_covers_is_refused(write_and_read, settings, said):
    with refused(said):
        write_and_read(MESSY, **settings)


@pytest.mark.parametrize(("changes", "said"), [
    ({"one_hot": "sex"}, "one-hot = 'sex': 'sex' must be COLUMN:CATEGORY"),
    ({"one_hot": "cp:1|1.0"}, "must be COLUMN:CATEGORY"),
    ({"drop": "id", "dataset": "text-csv"}, "drop = 'id': only for a table of your own"),
])  # fmt: skip
def test_a_wrong_definition_is_refused_before_reading(open_clients, changes, said):
    with refused(said):
        open_clients(2, **{"dataset": "arrays", "data_dir": "absent", **changes})


def test_a_text_in_parquet_that_is_no_text_is_refused(read_dataset, tmp_path):
    # a column of one text that is a single byte, and no UTF-8
    offsets = pa.array([0, 1], pa.int32()).buffers()[1]
    no_utf8 = pa.Array.from_buffers(pa.string(), 1, [None, offsets, pa.py_buffer(b"\x80")])
    columns = {"a": [1.5], "label": no_utf8}
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    with refused(r"t\.parquet cannot be read as Parquet \(.*utf-8"):
        read_dataset("arrays", tmp_path)


def test_parquet_has_numbers_texts_and_gaps_of_its_own(read_dataset, tmp_path):
    """Truth values are 0 and 1; lists and huge numbers are refused unless they are dropped."""
    columns = {
        "a": [1.5, None],
        "on": [True, False],
        "sex": ["m", None],
        "v": [[1], [3]],
        "label": ["x", "y"],
        "b": [0.5, 2.5],
        "z": [2.0, 1e300],
        "domain": ["n", "s"],
        "__index_level_0__": [7, 8],  # as pandas writes it
    }
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    sexes = {"one_hot": "sex: f | m"}

    data = read_dataset("arrays", tmp_path, **sexes, impute="mean", drop="v,z")
    inputs = np.nan_to_num(data.inputs, nan=-1)
    assert inputs.tolist() == [[1.5, 1, 0, 1, 0.5], [-1, 0, 0, 0, 2.5]]
    assert data.classes == ("x", "y")
    assert data.domain_names == ("n", "s")
    assert data.columns == ("a", "on", "sex:f|m", "b")

    bad_columns = [
        r"row 1, column 'a': None is not a finite number but a gap",
        r"row 0, column 'v': \[1\] is a list",
        r"row 1, column 'z': 1e\+300 has a number that is too large",
    ]
    with refused(r"(.|\n)*".join(bad_columns)):
        read_dataset("arrays", tmp_path, **sexes)


# -- what values are fitted on
def table(test=0.0, south=0.0, validation=0.0):
    """Return a table of two clients with eight samples each: two to test, one to validate.

    ``test`` is added to the values of test samples, ``validation`` to those for validation, and
    ``south`` to those of the second client. Every fifth value of column a is a gap.
    """
    text = "a,b,client,split,label\n"
    for row in range(16):
        value = float(row * row)
        part = "train"
        client = "north"
        if row % 4 == 3:
            part = "test"
            value += test
        elif row % 8 == 4:
            part = "validation"
            value += validation
        if row >= 8:
            client = "south"
            value += south
        value_or_gap = value if row % 5 else ""
        text += f"{value_or_gap},{-value},{client},{part},{'xy'[row % 2]}\n"
    return text


def trained_on(client):
    """Return the training inputs as a model is given them: gaps are filled, values scaled."""
    return normalised(client.train_inputs, client.mean, client.std, torch.device("cpu")).tolist()


@pytest.mark.parametrize("standardise", ["auto", "client", "pooled"])
@pytest.mark.parametrize("impute", ["mean", "median"])
def test_neither_test_samples_nor_other_clients_change_what_is_trained_on(
    write_and_read, open_clients, tmp_path, standardise, impute
):
    """The table is read again with other values in the rows that must not matter."""
    own = {"dataset": "arrays", "data_dir": str(tmp_path / "t.csv"), "partition": "natural"}
    own |= {"test_from": "official-own", "impute": impute, "standardise": standardise}

    def clients_of(text):
        """Write the table, and return what the two clients have of it."""
        write_and_read(text, impute=impute)
        clients = open_clients(2, **own, train_samples=0)
        assert np.isfinite(clients[0].train_inputs).all()
        assert np.isfinite(clients[0].test_inputs).all()
        return clients

    north, south = clients_of(table())
    north_of_other_tests, south_of_other_tests = clients_of(table(test=1e4))
    assert trained_on(north_of_other_tests) == trained_on(north)
    assert trained_on(south_of_other_tests) == trained_on(south)
    assert north_of_other_tests.fill == north.fill

    north_of_other_validation, _ = clients_of(table(validation=1e4))
    assert trained_on(north_of_other_validation) == trained_on(north)

    north_beside_other_south, _ = clients_of(table(south=1e4))
    is_apart = standardise != "pooled"  # pooled values are of all clients' training samples
    assert (trained_on(north_beside_other_south) == trained_on(north)) == is_apart
    assert (north_beside_other_south.fill == north.fill) == is_apart
    if is_apart:
        assert np.allclose(np.mean(trained_on(north), axis=0), 0, atol=1e-6)
        assert np.allclose(np.std(trained_on(north), axis=0), 1, atol=1e-6)


def test_a_split_made_here_leaks_nothing_either(write_and_read, open_clients, tmp_path):
    """The split is ours for bundled tables, and where a file marks no test samples.

    The table is read once to learn which of its values are test samples, and again with -99 in the
    place of these: what is trained on must stay as it was.
    """
    values = np.arange(40)

    def client_of(values):
        """Write a table with this column and two classes in turn; return its only client."""
        rows = [f"{value},{'xy'[row % 2]}\n" for row, value in enumerate(values)]
        write_and_read("a,label\n" + "".join(rows))
        (client,) = open_clients(
            1, dataset="arrays", data_dir=str(tmp_path / "t.csv"), partition="own"
        )
        assert client.mean == (client.train_inputs.mean(dtype=np.float64),)
        return client

    client = client_of(values)
    is_test = np.isin(values, client.test_inputs)  # no two values are equal
    with_other_tests = client_of(np.where(is_test, -99, values))
    assert trained_on(with_other_tests) == trained_on(client)

    for client in open_clients(3, dataset="wine", partition="iid"):
        np.testing.assert_allclose(client.mean, client.train_inputs.mean(axis=0), rtol=1e-5)


def test_a_sample_that_clients_share_counts_once_in_the_pooled_scale(open_clients):
    """Four clients share samples where a class has run out."""
    shared = {"partition": "n-way-k-shot", "ways": 3, "ways_stdev": 0, "shots": 30}
    clients = open_clients(4, dataset="wine", **shared, train_samples=0, standardise="pooled")

    samples = np.concatenate([client.train_inputs for client in clients])
    each_once = np.unique(samples, axis=0)
    assert len(each_once) < len(samples)
    np.testing.assert_allclose(clients[0].mean, each_once.mean(axis=0), rtol=1e-5)


def test_images_are_normalised_by_the_data_set_unless_asked(open_clients):
    """``standardise``: "client" is by each client's own images, "pooled" by all clients'."""
    whole = open_clients(2)
    assert whole[0].mean == whole[1].mean

    alone = open_clients(2, standardise="client")
    assert alone[0].mean != alone[1].mean

    pooled = open_clients(2, standardise="pooled")
    assert pooled[0].mean == pooled[1].mean != whole[0].mean


def test_a_feature_without_a_value_at_a_client_is_nought_there(
    write_and_read, open_clients, tmp_path
):
    """South has no value of ``a``, and so no mean to fill in: its model is given 0."""
    lines = []
    for line in table().splitlines():
        if ",south," in line:
            _, others = line.split(",", 1)
            line = f",{others}"
        lines.append(f"{line}\n")
    write_and_read("".join(lines), impute="mean")

    own = {"dataset": "arrays", "data_dir": str(tmp_path / "t.csv"), "partition": "natural"}
    _, south = open_clients(2, **own, test_from="official-own", impute="mean")
    assert {row[0] for row in trained_on(south)} == {0.0}


# -- classes
def test_many_classes_and_few_fractions_are_classes_and_so_is_a_column():
    """60 labels of two samples each; six fractions; labels [N, 1]; 60 names that are declared."""

    def number_of_classes(labels, classes=""):
        arrays = {"inputs": np.ones((len(labels), 2)), "labels": labels}
        return len(from_arrays(arrays, "here", classes).classes)

    assert number_of_classes(np.arange(120) // 2) == 60
    assert number_of_classes(np.arange(60) % 6 / 4) == 6
    assert number_of_classes(np.arange(60)[:, None] % 6) == 6

    names = [f"P{i}" for i in range(60)]
    assert number_of_classes(names, classes=",".join(names)) == 60
