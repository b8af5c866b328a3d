"""What is written into a run's folder is read back as it was; what is not whole is left out."""

import json

import pytest

from protofl_common.config.options import SettingsError
from protofl_common.runs import folder
from protofl_common.runs.folder import RunFolder
from tests.support.harness import run_config, run_federation


def margin_row(number):
    """Return the margins of round ``number``: of two classes, one of which has none."""
    return {"round": number, "global": [1.0, None], "clients": {"λ": [None, 0.5]}}


def test_rows_come_back_without_a_line_of_which_only_a_part_was_written(tmp_path):
    """A part of line 1 is dropped before the run goes on; one of line 4 is not read."""
    run = RunFolder(tmp_path)
    (tmp_path / folder.MARGINS).write_text('{"round": 1, ')
    run.drop_margins_after(0)

    for number in (1, 2, 3):
        run.add(folder.MARGINS, margin_row(number))

    with (tmp_path / folder.MARGINS).open("a") as file:
        file.write('{"round": 4, "glo')

    assert list(run.margins()) == [margin_row(number) for number in (1, 2, 3)]

    run.drop_margins_after(2)
    run.add(folder.MARGINS, margin_row(3))

    assert list(run.margins()) == [margin_row(number) for number in (1, 2, 3)]


def test_an_empty_or_damaged_folder_is_a_run_that_has_not_begun(tmp_path):
    """Every file is read as if it was not there."""
    run = RunFolder(tmp_path)

    def assert_not_begun():
        """Nothing is found, and to ask for the summary says what folder to give."""
        assert run.rows() == []
        assert list(run.margins()) == []
        assert run.sites() == {}
        assert run.summary() is None
        said = r"no summary\.json in it; give the folder of a finished run"
        with pytest.raises(SettingsError, match=said):
            run.finished_summary()
        run.drop_margins_after(0)

    assert_not_begun()

    (tmp_path / folder.SITES).write_text("[" * 10**5)  # deeper than JSON may be nested
    (tmp_path / folder.SUMMARY).write_bytes(b"\xff\xfe")  # no UTF-8

    assert_not_begun()


def test_older_folders_open_and_later_ones_are_named(tmp_path):
    """A file of an older version has no format number, one of a later version a larger one."""
    run = RunFolder(tmp_path)
    content = folder.Sites(algorithm="FedTGP", sites={"a": {"arch": "cnn4"}})
    run.write(folder.SITES, content)

    assert run.sites() == {"format": folder.FORMAT, **content}

    (tmp_path / folder.SITES).write_text(json.dumps(content))

    assert run.sites() == content

    later = folder.FORMAT + 1
    (tmp_path / folder.SITES).write_text(json.dumps(content | {"format": later}))

    with pytest.raises(SettingsError, match=rf"sites\.json has format {later}, of a later version"):
        run.sites()


def test_a_real_run_writes_every_declared_key_and_no_other(tmp_path):
    """``optional`` keys are declared, and stand only in runs of another kind."""
    with_metrics = {"metrics": "auc", "validation_fraction": 0.2}
    config = run_config(tmp_path, algo="fedplvm", rounds=1, **with_metrics)
    run = RunFolder(run_federation(config, clients=2).folder)

    for row in run.rows():
        optional = {"server", "epsilon", "epsilon-of", "void-because", "unused", "bounded", "liars"}
        optional.add("counted-late")
        assert row.keys() | optional == folder.RoundRow.__annotations__.keys()
        optional = {"prototypes-of-classes", "epsilon"}
        for client in row["clients"].values():
            assert client.keys() | optional == folder.ClientRow.__annotations__.keys()

    assert [row["kind"] for row in run.rows()] == ["round", "final"]
    assert [row.keys() for row in run.margins()] == [folder.MarginRow.__annotations__.keys()]

    optional = {"data", "epsilon", "epsilon-of-ledgers"}  # data: of a user's own

    assert run.finished_summary().keys() | optional == folder.Summary.__annotations__.keys()
    assert run.sites().keys() == folder.Sites.__annotations__.keys()

    for facts in run.sites()["sites"].values():
        assert facts.keys() == folder.SiteFacts.__annotations__.keys()
