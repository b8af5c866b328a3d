"""Files are written whole or not at all; a file of tensors comes back as it was, or not at all."""

import os
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from protofl_common.basics.files import (
    TensorFileError,
    cache_folder,
    digest,
    locked,
    replacing,
    write_text,
)
from protofl_common.basics.tensorfile import read_tensors, write_tensors
from tests.support.accidents import flip_a_bit


def test_text_replaces_what_was_there_and_makes_missing_folders(tmp_path):
    file = tmp_path / "new" / "a.txt"
    for text in ("first", "λ"):
        write_text(file, text)
        assert file.read_text() == text
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("where", ["os.replace", "os.fsync", "pathlib.Path.write_text"])
def test_a_failure_leaves_the_old_file_and_nothing_beside_it(where, tmp_path, monkeypatch):
    """An error of the system, which has a number, gets the file's name; any other stays."""
    fail = Mock(side_effect=[OSError("9 of 10 bytes"), OSError(28, "No space left")])
    write_text(tmp_path / "a", "old")
    monkeypatch.setattr(where, fail)

    for said in ("^9 of 10 bytes$", f"No space left: '{tmp_path}/a'"):
        with pytest.raises(OSError, match=said):
            write_text(tmp_path / "a", "new")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("a", "old")]


def test_a_folder_replaces_a_folder_but_a_file_never_does(tmp_path):
    """``replacing`` makes "entry" twice; the second time it replaces the first."""
    for number in (1, 2):
        with replacing(tmp_path / "entry") as beside:
            beside.mkdir()
            (beside / str(number)).touch()

    assert [path.name for path in (tmp_path / "entry").iterdir()] == ["2"]
    with pytest.raises(OSError, match="directory"):
        write_text(tmp_path / "entry", "text")
    assert (tmp_path / "entry" / "2").exists()


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o700])
def test_nobody_else_reads_what_is_private_while_it_is_written(mode, tmp_path):
    """The file, or its folder, is closed to others from the beginning."""
    tmp_path.chmod(mode)
    before = os.umask(0o022)  # others may read new files
    try:
        with replacing(tmp_path / "key", private=True) as beside:
            beside.write_text("secret")
            # what others may do with the file, and with its folder: one of them must be closed
            assert 0 in [path.stat().st_mode & 0o077 for path in (beside, beside.parent)]
    finally:
        os.umask(before)

    (key,) = tmp_path.iterdir()
    assert (key.name, key.stat().st_mode & 0o777) == ("key", 0o600)


def test_a_lock_makes_its_folder_clears_leftovers_and_is_free_again_after_an_error(tmp_path):
    """A lock that cannot be written raises the system's own error, to which its caller can add."""
    entry = tmp_path / "new" / "entry"
    with locked(entry):
        entry.with_name("entry.0a1b2c3d.tmp").touch()  # as a killed process leaves it

    with pytest.raises(ValueError, match="in the middle"), locked(entry):
        raise ValueError("in the middle")

    with locked(entry):
        assert [file.name for file in entry.parent.iterdir()] == ["entry.lock"]
    (tmp_path / "file").touch()

    with pytest.raises(OSError, match="file"), locked(tmp_path / "file" / "entry"):
        pass


def test_a_digest_stands_for_its_parts_in_their_order():
    """Their types and borders count too; a tuple and a list are alike."""
    assert digest("a", 1, [2.5]) == digest("a", 1, (2.5,))
    assert len({digest("a", 1), digest(1, "a"), digest("a", "1"), digest("a1")}) == 4


def test_the_cache_is_where_the_setting_says_or_in_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("") == tmp_path / "protofl"
    assert cache_folder(str(tmp_path / "other")) == tmp_path / "other"


CPU = torch.device("cpu")
FACTS = {"format": "some-1", "facts": '{"sites": ["nörth"]}'}


def tensors():
    """Return tensors of several types and shapes: a transposed one, a scalar, an empty one."""
    return {
        "a": torch.tensor([[0.0, -1.5], [2.0, 3.0]]).T,
        "half": torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
        "count": torch.tensor(7),
        "seen": torch.tensor([True, False]),
        "none": torch.zeros(0, 3),
    }


def test_tensors_and_facts_are_read_as_they_were_written(tmp_path):
    write_tensors(tmp_path / "x", tensors(), FACTS)
    found, facts = read_tensors(tmp_path / "x", CPU)

    assert (facts, found.keys()) == (FACTS, tensors().keys())
    for name, value in tensors().items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value)


@pytest.mark.slow
def test_a_flipped_bit_anywhere_is_noticed(tmp_path):
    """Every eleventh bit is flipped, one at a time.

    Only a flip in the key "checksum" itself may go unnoticed: the file then seems to have none.
    """
    write_tensors(tmp_path / "x", tensors(), FACTS)
    whole = (tmp_path / "x").read_bytes()
    harmless = 0
    step = 11  # bits
    for bit in range(0, 8 * len(whole), step):
        flip_a_bit(tmp_path / "x", bit)
        try:
            found, _ = read_tensors(tmp_path / "x", CPU)
            assert all(torch.equal(found[name], value) for name, value in tensors().items())
            harmless += 1
        except TensorFileError:
            pass
        (tmp_path / "x").write_bytes(whole)

    most_flips_in_the_key = 8 * len("checksum") / step + 1  # its bits, every eleventh, rounded up
    assert harmless <= most_flips_in_the_key


def test_a_truncated_or_missing_file_is_an_error_that_names_it(tmp_path):
    """The file x is cut to several lengths; y is not there."""
    write_tensors(tmp_path / "x", tensors(), FACTS)
    whole = (tmp_path / "x").read_bytes()
    for length in (0, 7, 100, len(whole) - 1):
        (tmp_path / "x").write_bytes(whole[:length])
        with pytest.raises(TensorFileError, match="x cannot be read"):
            read_tensors(tmp_path / "x", CPU)

    with pytest.raises(TensorFileError, match="y cannot be read"):
        read_tensors(tmp_path / "y", CPU)


def test_files_without_a_checksum_are_read_and_ours_are_plain_safetensors(tmp_path):
    """Whoever writes with the safetensors library alone adds no checksum."""
    save_file({"a": torch.ones(2)}, tmp_path / "old", metadata={"format": "some-0"})
    found, facts = read_tensors(tmp_path / "old", CPU)

    assert (found["a"].tolist(), facts) == ([1.0, 1.0], {"format": "some-0"})

    write_tensors(tmp_path / "x", tensors(), FACTS)
    assert torch.equal(load_file(tmp_path / "x")["a"], tensors()["a"])
