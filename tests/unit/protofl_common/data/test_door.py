"""The check of all data that become samples: what is not as its owner thinks is refused or said."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from protofl_common.data.door import from_arrays
from protofl_common.data.objects import inputs_for
from protofl_common.data.own import tokens
from protofl_common.data.store import data_key
from protofl_common.data.table import TableFile
from tests.unit.protofl_common.data.conftest import refused, write_image

TABLE = SimpleNamespace(input_type="float32", input_shape=(2,), fill=())
PHOTO = SimpleNamespace(input_type="uint8", input_shape=(3, 12, 16), fill=())
BEHIND_A_MASK = np.ma.masked_equal([[1.0, 2.0], [3.0, 4.0]], 4.0)


# -- numbers
@pytest.mark.parametrize(("value", "said"), [
    ([[1, 2], [3, np.nan]], r"sample 1 has nan at \[1\]"),
    ([[1, 2], [3, 1e39]], r"sample 1 has 1e\+39 at \[1\]"),
    ([[1, np.inf], [3, 4]], r"sample 0 has inf at \[1\]"),
    (BEHIND_A_MASK, r"sample 1 has nan at \[1\]"),
    ([*BEHIND_A_MASK], r"sample 1 has nan at \[1\]"),  # a list of rows with masks
    ([BEHIND_A_MASK[0], BEHIND_A_MASK[1, :1]], "differ in shape"),
    (torch.eye(2).to_sparse(), "are no array .*Sparse"),
    (np.ma.masked_equal([[1, 2], [3, 4]], 4), "are masked, and no floating point"),
    ([["a", "b"], ["c", "d"]], r"are <U1 \[2, 2\], not numbers"),
    ([[1.0], [1.0, 2.0]], "differ in shape"),
])  # fmt: skip
def test_what_training_refuses_prediction_refuses(value, said):
    with refused(said):
        from_arrays({"inputs": value, "labels": [0, 1]}, "here")
    with refused(said):
        inputs_for(TABLE, value)


def test_a_model_is_given_what_its_card_says(capsys):
    """Inputs have the card's type and shape, and gaps only if it says how to fill them."""
    assert inputs_for(TABLE, [[-1, 2]]).tolist() == [[-1, 2]]
    with_gradient = torch.ones(2, 2, dtype=torch.bfloat16, requires_grad=True)
    assert inputs_for(TABLE, with_gradient).dtype == np.float32
    filling = SimpleNamespace(**{**vars(TABLE), "fill": (0.0, 0.0)})
    assert np.isnan(inputs_for(filling, BEHIND_A_MASK)).sum() == 1
    for value, card in ((np.ones((1, 3)), TABLE), (np.zeros((1, 3, 12, 16)), PHOTO)):
        with refused(r"a sample is float32 .*; the model takes"):
            inputs_for(card, value)

    inputs_for(TABLE, [[1e9, 0], [1e9 + 1, 1]])  # which are one number in float32
    assert "sample 1, feature 0: 1000000001 is 1000000000 to a model" in capsys.readouterr().err


@pytest.mark.parametrize("shape", [
    (2, 12, 16, 3), (2, 28, 30, 1), (2, 9, 9, 4), (2, 9, 9, 9, 1),
])  # fmt: skip
def test_channels_last_are_refused_whatever_the_shape(shape):
    with refused("the channels first"):
        from_arrays({"inputs": np.zeros(shape, np.uint8), "labels": [0, 1]}, "here")


def test_signals_of_more_channels_than_steps_are_said(capsys):
    """Such arrays may be signals with the channels last, or grey images without a channel."""
    from_arrays({"inputs": np.eye(18).reshape(2, 9, 18), "labels": [0, 1]}, "here")
    assert not capsys.readouterr().err
    from_arrays({"inputs": np.eye(18).reshape(2, 18, 9), "labels": [0, 1]}, "here")
    assert "which are signals [N, channels, steps]: 18 channels of 9" in capsys.readouterr().err


AGES_MODEL = SimpleNamespace(input_type="float32", input_shape=(1,), columns=("age",), fill=())
TEXTS_MODEL = SimpleNamespace(input_type="int64", input_shape=(4,), columns=("text",), fill=())
ARRAYS_MODEL = SimpleNamespace(**{**vars(AGES_MODEL), "columns": (), "input_shape": (2,)})
HEADERLESS_MODEL = SimpleNamespace(**{**vars(TEXTS_MODEL), "columns": ()})


@pytest.mark.parametrize(("card", "text", "said"), [
    (AGES_MODEL, "age,age\n1,2\n", "several columns are called 'age'"),
    (AGES_MODEL, "age,b\n,2\n", r"'' is not a finite number but a gap \(1 of 1 values\)$"),
    (ARRAYS_MODEL, "1.5,2\n3,4\n", "its first row has numbers, and no names"),
    (HEADERLESS_MODEL, "good\nbad\n", "call columns of texts alone text, text 1"),
])  # fmt: skip
def test_a_file_to_predict_is_read_by_its_names(card, text, said, tmp_path):
    """The error proposes no settings, as an exported model has none."""
    file = tmp_path / "new.csv"
    file.write_text(text)
    with refused(said):
        inputs_for(card, TableFile(file))


def test_a_file_without_names_may_be_predicted_as_it_was_trained_on(tmp_path):
    """Its first row is a sample, and the label no part of the text."""
    texts = tokens(["good film", "bad plot", "so nice"], 4)
    for text in ("1,good film\n0,bad plot\n1,so nice\n", "text\ngood film\nbad plot\nso nice\n"):
        (tmp_path / "new.csv").write_text(text)
        table = TableFile(tmp_path / "new.csv")
        assert inputs_for(HEADERLESS_MODEL, table).tolist() == texts.tolist()
    (tmp_path / "new.csv").write_text("0,1\n3,4\n")  # as pandas names columns
    assert inputs_for(ARRAYS_MODEL, TableFile(tmp_path / "new.csv")).tolist() == [[3, 4]]


def test_a_data_frame_to_predict_is_checked(tmp_path):
    pandas = pytest.importorskip("pandas")
    for frame, card, said in (
        (pandas.DataFrame([[1, 2]], columns=["age", "age"]), AGES_MODEL, "Duplicate column"),
        (pandas.DataFrame({"text": ["good", None]}), TEXTS_MODEL, "row 1, column 'text': None is"),
        (["good " * 99, "bad"], TEXTS_MODEL, "are texts; give a data frame of these columns: text"),
    ):
        with refused(said):
            inputs_for(card, frame)


# -- labels
def labelled(labels, **arrays):
    """Return the data of as many samples, each with the input 1, that have these labels."""
    return from_arrays({"inputs": np.ones((len(labels), 1)), "labels": labels, **arrays}, "here")


AGES = (np.random.default_rng(1).normal(50, 25, 200).astype(int)).clip(0).tolist()
"""Whole numbers, of which each is the label of few samples."""


@pytest.mark.parametrize(("labels", "said"), [
    ([0, 1, -1], "labels '-1' .* stand for none"),
    ([0, 1, 255], "labels '255' .* stand for none"),
    (["a", "b", "#N/A"], "labels '#N/A' .* stand for none"),
    (["a", "b", "missing"], "labels 'missing' .* stand for none"),
    (["a", "b", "."], r"labels '\.' .* stand for none"),
    (["0.0", "1.0", "-1.0"], r"labels '-1\.0' .* stand for none"),  # as pandas writes them
    (["1", "2", "99"], "labels '99' .* stand for none"),
    ([0, 1, 65535], "labels '65535' .* stand for none"),
    (["sick", "well", "-"], "labels '-' .* stand for none"),
    (["sick", "well", "N.A."], r"labels 'N\.A\.' .* stand for none"),
    (["sick", "well", "\\N"], r"labels '\\\\N' .* stand for none"),  # as MySQL writes NULL
    (["01", "1", "2"], "labels '01', '1' are alike"),
    (["non\xa0small", "small"], r"'non\\xa0small': .* U\+00A0 NO-BREAK SPACE here"),
    (["mass", "nodule", "mass|nodule"], r"labels 'mass\|nodule' join other labels"),
    (["a", "a"], "'a' is the only label: one class alone"),
    (AGES, r"different values of 200 samples.*quantities \(regression\)"),
    (
        np.linspace(0, 1, 60),
        r"60 different values of 60 samples, such as '0\.0': quantities \(regression\)",
    ),
    ([f"{i / 7:.2f}" for i in range(60)], r"quantities \(regression\) cannot be learned"),
    ([f"P{i}" for i in range(60)], "60 different values of 60 samples, such as 'P0': no classes"),
    (np.arange(60), "no classes, but quantities or names of samples"),
    (
        np.eye(60, 3),
        r"the first label is array\(\[1\., 0\., 0\.\]\): several labels of a sample need task",
    ),
    ([["a"], ["a", "b"]] * 30, r"several labels of a sample need task"),
    ([b"gut", b"b\xf6se"], r"sample 1 has b'b\\xf6se', no UTF-8"),
    (["a", "b\n60,1,b\n61,2,b"], r"labels: sample 1 has 'b; 60,1,b; 61,2,b': a name has no"),
    (["a", "b" * 201], r"labels: sample 1 has 'b{40} … \(201 characters\)'"),
])  # fmt: skip
def test_labels_that_are_no_classes_are_refused(labels, said):
    with refused(said):
        labelled(labels)


@pytest.mark.parametrize("labels", ["abab", np.array(1), 1])
def test_one_value_is_no_list_of_labels(labels):
    with refused("labels are .*, no list with one for each input"):
        from_arrays({"inputs": np.ones((4, 1)), "labels": labels}, "here")


def test_labels_that_are_classes(capsys):
    """Signs, bytes and commas are no obstacle; a rare label that begins as another is printed."""
    assert labelled([-1, 1]).classes == ("-1", "1")
    assert labelled(["+", "-"]).classes == ("+", "-")
    assert labelled([0, 50, 99]).classes == ("0", "50", "99")  # not far above the others
    assert labelled([b"b", b"a"]).classes == ("a", "b")
    assert labelled(["lung, left", "lung, right"]).classes == ("lung, left", "lung, right")
    with_one_cut_off = labelled(["sick"] * 20 + ["well"] * 20 + ["si"])
    assert len(with_one_cut_off.classes) == 3
    assert "here, sample 40: alone has the label 'si'" in capsys.readouterr().err
    with refused("has both client and domain"):
        labelled([0, 1], client=["x", "y"], domain=["u", "v"])
    with refused("sample 1 has no client"):
        labelled([0, 1], client=["x", "NA"])
    labelled([0, 1], client=["P1", "p1"])
    assert "here: client: 'P1', 'p1' are alike" in capsys.readouterr().err


def test_a_number_with_zeros_before_it_is_a_name(write_and_read):
    """Classes keep their zeros, as folders of GTSRB have them, so that ``classes`` finds them."""
    rows = "".join(f"{number},{number % 2:02}\n" for number in range(8))
    assert write_and_read("arrays", "t.csv", f"a,label\n{rows}").classes == ("00", "01")
    assert write_and_read("arrays", "t.csv", f"a,label\n{rows}", classes="00,01,02").labels[1] == 1


# -- text files
OPEN_QUOTE = 'a,label\n1,x\n2,y\n3,"x\n4,y\n5,x\n'


@pytest.mark.parametrize("dataset", ["arrays", "text-csv"])
def test_a_quote_without_its_pair_is_named_by_its_lines(write_and_read, dataset):
    with refused("the row that begins in line 4 cannot be read, up to line 6"):
        write_and_read(dataset, "t.csv", OPEN_QUOTE)
    with refused("line 4 has 'x; 4,y; 5,x; 6,y': a name has no line break"):
        write_and_read(dataset, "t.csv", f'{OPEN_QUOTE}6,y"\n')


def test_the_lines_of_a_text_file_are_counted_and_repeated_names_refused(write_and_read, capsys):
    data = write_and_read("text-csv", "t.csv", 'label,text\nx,"one\ntwo"\ny,three\n')
    assert data.notes[0].endswith("t.csv: 2 rows in 4 lines")
    assert data.notes[0] in capsys.readouterr().err
    with refused("line 3: is the row of names again"):
        write_and_read("arrays", "t.csv", "a,label\n1,x\na,label\n2,y\n")


@pytest.mark.parametrize("first", ["", "sep=;\n"])
def test_semicolons_with_decimal_commas_are_read(write_and_read, first):
    data = write_and_read("arrays", "t.csv", f'{first}a;"b;c, d";label\n1,5;2;x\n-,25;3e2;y\n')
    assert data.inputs.tolist() == [[1.5, 2], [-0.25, 300]]
    assert data.columns == ("a", "b;c, d")


@pytest.mark.parametrize(("rows", "unclear"), [
    ("1,234;7;x\n850;8;y\n", "line 2, column 'a': '1,234'"),  # thousands, or decimals?
    ("1.234;18,5;x\n850;19,5;y\n", "line 2, column 'a': '1.234'"),  # German thousands
    ("1.234,50;7;x\n2;8;y\n", "line 2, column 'a': '1.234,50'"),
])  # fmt: skip
def test_a_sign_that_may_stand_between_thousands_makes_no_number(rows, unclear, write_and_read):
    with refused(f"{unclear} may be thousands or decimals"):
        write_and_read("arrays", "t.csv", f"a;b;label\n{rows}")


def test_other_columns_show_that_commas_are_decimal_ones(write_and_read):
    data = write_and_read("arrays", "t.csv", "a;b;label\n1,234;18,5;x\n2,500;19,5;y\n")
    assert data.inputs.tolist() == np.float32([[1.234, 18.5], [2.5, 19.5]]).tolist()


def test_names_with_any_sign_can_be_columns_and_be_dropped(write_and_read):
    """The error proposes a value of ``drop``, which works as it stands."""
    text = '"k__B|p__F",MET:z|rt,"Bilirubin, total",label\n1,2,high,x\n3,4,5,y\n'
    with refused("""drop=' "Bilirubin, total"'""") as caught:
        write_and_read("arrays", "t.csv", text)
    drop = str(caught.value).rpartition("drop=")[2].strip("'")  # as the error proposes it
    data = write_and_read("arrays", "t.csv", text, drop=drop)
    assert data.inputs.tolist() == [[1, 2], [3, 4]]
    with refused("'1_0' is not a finite number"):
        write_and_read("arrays", "t.csv", "a,label\n1_0,x\n2,y\n")


def test_what_was_said_is_noted_for_those_who_open_the_data_later(write_and_read):
    """What was printed while a file was read is told again, as by ``protofl doctor``."""
    rows = "".join(f"{number},{number % 2}\n" for number in range(40))
    for _ in range(2):
        (note,) = write_and_read("arrays", "t.csv", f"a,label\n{rows}").notes
        assert "column 'a' numbers the rows" in note


def test_a_column_that_numbers_the_rows_is_said(write_and_read, capsys):
    rows = [f"{row},{row % 7},{'xy'[row // 20]}\n" for row in range(40)]  # sorted by label
    write_and_read("arrays", "t.csv", f"Id,a,label\n{''.join(rows)}")
    assert "column 'Id' numbers the rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    "word", ["हिन्दी", "தமிழ்", "שָׁלוֹם", "السَّلَامُ", "cafe\u0301", "İstanbul", "می\u200cروم"]
)
def test_a_word_keeps_the_marks_of_its_letters(word):
    """Vowels of Hindi, points of Hebrew, accents after their letter, and joiners are no words."""
    assert np.count_nonzero(tokens([f"{word} x"], 8)) == 2


def test_an_accent_makes_one_token_however_it_is_written():
    composed, in_two = tokens(["café", "cafe\u0301"], 4)
    assert (composed == in_two).all()


def test_a_language_without_blanks_has_a_token_for_each_letter():
    chinese_of_6 = "今天天气很好"
    thai_of_7 = "อากาศดี"
    found = tokens([chinese_of_6, thai_of_7], 9)
    assert np.count_nonzero(found, axis=1).tolist() == [6, 7]  # 0 is padding


# -- folders
@pytest.fixture
def photos(tmp_path):
    """A folder with four images each of a cat and of a dog."""
    root = tmp_path / "photos"
    for shade, name in enumerate(("cat", "dog")):
        for number in range(4):
            write_image(root / name / f"{number}.jpg", (60 * number, 99 * shade, 0))
    return root


def test_every_file_is_accounted_for(photos, read_dataset, capsys):
    """What is no image of a class is counted, and the counts are printed."""
    for path in ("dog/.ipynb_checkpoints/0.jpg", "dog/@eaDir/1.jpg", "cat/Thumbnails/2.png"):
        write_image(photos / path)
    for path in ("cat/4.dcm", "cat/5.dcm", "cat/.DS_Store", "list.txt"):
        (photos / path).write_bytes(b"")
    os.mkfifo(photos / "cat/pipe.jpg")
    (photos / "cat/0.jpg").rename(photos / "cat/0.jfif")  # another ending of JPEG files

    data = read_dataset("image-folder", photos, image_size=8)

    assert len(data.labels) == 8
    left_out = (
        "2 *.dcm, 1 *.jpg, 1 *.txt, 1 folder .ipynb_checkpoints, 1 folder @eaDir, "
        "1 folder Thumbnails, 1 hidden file"
    )
    assert data.notes == (f"{photos}: 8 images of cat, dog; left out: {left_out}",)
    assert data.notes[0] in capsys.readouterr().err


def test_masks_and_copies_of_programs_are_none_of_the_images(photos, read_dataset):
    """Masks lie beside their images or in a folder; what else lies below a class is said."""
    for path in ("cat/0_mask.jpg", "dog/masks/0.jpg", "dog/x.lrdata/0.jpg", "dog/deleted/0.jpg"):
        write_image(photos / path)
    write_image(photos / "cat/face_mask.jpg", (7, 7, 7))  # of no image beside it
    write_image(photos / "cat/images/late.jpg", (9, 9, 9))
    (note,) = read_dataset("image-folder", photos, image_size=8).notes
    assert "10 images of cat, dog; 1 of them in folders below their class: images;" in note
    assert note.endswith(
        "1 folder deleted, 1 folder masks, 1 folder x.lrdata, 1 named as masks of others"
    )


def test_classes_may_have_their_images_in_folders_of_one_name(photos, read_dataset):
    """As in Tiny ImageNet; only if such a name could be a class, they may be parts."""
    for name in ("cat", "dog"):
        (photos / name).rename(photos / "moved")
        (photos / name).mkdir()
        (photos / "moved").rename(photos / name / "images")
        write_image(photos / name / "masks" / "0.jpg")
    assert len(read_dataset("image-folder", photos, image_size=8).labels) == 8


@pytest.mark.parametrize(("parts", "inside"), [
    ("train test", "."),
    ("train2017 val2017", "."),
    ("fold1 fold2", "."),
    ("TestSet val", "."),
    ("eval dog", "dog"),  # "eval" alone might be a class, but it has dogs beside "dog"
    ("seg_train/seg_train seg_test/seg_test", "cat dog"),
    ("north south", "cat dog"),
    ("chest/train train", "cat dog"),
])  # fmt: skip
def test_parts_folds_and_sites_are_no_classes(parts, inside, tmp_path, read_dataset):
    """Images lie in the parts themselves, or in folders ``inside`` them."""
    for shade, part in enumerate(parts.split()):
        for number, name in enumerate(inside.split()):
            write_image(tmp_path / part / name / "0.png", (shade, number, 0))
    with refused("parts, folds or sites of a data set, which would be taken for classes"):
        read_dataset("image-folder", tmp_path, image_size=8)


def test_parts_are_no_domains_though_there_are_other_folders(photos, read_dataset):
    """A class may be called "valid", for all that one can know."""
    for part in ("train", "Test", "extra"):
        write_image(photos.parent / "data" / part / "cat" / "0.png")
    with refused("Test, train in .* which would be taken for domains; .* call sites otherwise"):
        read_dataset("domain-folder", photos.parent / "data", image_size=8)

    (photos / "dog").rename(photos / "valid")
    assert read_dataset("image-folder", photos, image_size=8).classes == ("cat", "valid")


def test_a_copy_of_an_image_is_left_out_or_refused(photos, read_dataset):
    """A copy in the same folder is left out; one in another class, part or client is refused."""
    copy = Image.open(photos / "cat/0.jpg")
    copy.save(photos / "cat/copy.png")
    data = read_dataset("image-folder", photos, image_size=8)
    assert len(data.labels) == 8
    copies = "left out 1 copies of other samples, such as"
    assert data.notes[1] == f"{photos}: {copies} {photos}/cat/copy.png"

    copy.save(photos / "dog/copy.png")
    with refused(r"cat/0\.jpg and .*dog/copy\.png .* of two labels"):
        read_dataset("image-folder", photos, image_size=8)
    for column, first, second in (("split", "train", "test"), ("client", "p", "q")):
        rows = f"cat/0.jpg,cat,{first}\ndog/1.jpg,dog,{first}\ndog/../cat/copy.png,cat,{second}\n"
        (photos / "list.csv").write_text(f"file,label,{column}\n{rows}")
        with refused("line 2 and line 4 are equal in all inputs, and of tw"):
            read_dataset("manifest", photos / "list.csv", image_size=8)


def test_a_link_that_leads_back_is_followed_once(photos, data_settings):
    """Otherwise the listing of the folder would go round and round, and never end."""
    for name in ("current", "latest"):
        (photos.parent / name).symlink_to(photos.parent)
    data_key(data_settings(dataset="image-folder", data_dir=str(photos.parent)))
