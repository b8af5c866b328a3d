"""Files that are written whole or not at all."""

from pathlib import Path

import pytest

from protofl_common.basics.files import cache_folder, digest, locked, replacing, write_text


def test_text_replaces_what_was_there_and_makes_missing_folders(tmp_path: Path) -> None:
    file = tmp_path / "new" / "a.txt"
    for text in ("first", "λ"):
        write_text(file, text)
        assert file.read_text(encoding="utf-8") == text
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("where", ["os.replace", "os.fsync", "pathlib.Path.write_text"])
def test_a_failure_leaves_the_old_file_and_nothing_beside_it(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    write_text(tmp_path / "a", "old")
    monkeypatch.setattr(where, fail)
    with pytest.raises(OSError, match="No space left"):
        write_text(tmp_path / "a", "new")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("a", "old")]


def test_a_folder_replaces_a_folder_but_a_file_never_does(tmp_path: Path) -> None:
    for number in (1, 2):
        with replacing(tmp_path / "entry") as beside:
            beside.mkdir()
            (beside / str(number)).touch()
    assert [path.name for path in (tmp_path / "entry").iterdir()] == ["2"]
    with pytest.raises(OSError, match="directory"):
        write_text(tmp_path / "entry", "text")
    assert (tmp_path / "entry" / "2").exists()


def test_a_lock_makes_its_folder_clears_leftovers_and_is_free_again_after_an_error(tmp_path: Path) -> None:
    """One that cannot be written is an error of the system: its caller can say which file it was for."""
    entry = tmp_path / "new" / "entry"
    with locked(entry):
        entry.with_name("entry.0a1b.tmp").touch()
    with pytest.raises(ValueError, match="in the middle"), locked(entry):
        raise ValueError("in the middle")
    with locked(entry):
        assert [file.name for file in entry.parent.iterdir()] == ["entry.lock"]
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"), locked(tmp_path / "file" / "entry"):
        pass


def test_a_digest_stands_for_its_parts_in_their_order() -> None:
    assert digest("a", 1, [2.5]) == digest("a", 1, (2.5,))
    assert len({digest("a", 1), digest(1, "a"), digest("a", "1"), digest("a1")}) == 4


def test_the_cache_is_where_the_setting_says_or_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("") == tmp_path / "protofl"
    assert cache_folder(str(tmp_path / "other")) == tmp_path / "other"
