"""Files that are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from protofl_common.files import replacing, write_text


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
