"""Files that are written whole or not at all: beside, onto the disk, then renamed; one at a time.

A process that is killed while it writes leaves the old file; so does a full disk. `tensorfile`
writes tensors in this way: this module loads no torch.
"""

import ctypes
import hashlib
import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path


class TensorFileError(RuntimeError):
    """A file of tensors could not be read or written; the message says which and why."""


@contextmanager
def replacing(path: Path, *, private: bool = False, durable: bool = True) -> Iterator[Path]:
    """Yield a free name; the file or folder written there replaces ``path`` after the ``with``.

    A folder must have no folders in it. After an error in the block ``path`` is as it was, and
    nothing is left beside it. A ``private`` file is written in a folder into which no other user
    can look: that of ``path``, or else one of its own. A power cut may undo what is not
    ``durable``, until `sync_disk_of`.
    """
    if private:
        make_private(path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    new = temporary
    try:
        # so that no other user sees a byte, not even if this process is killed
        if private and not is_private(path.parent):
            temporary.mkdir(mode=0o700)
            new = temporary / path.name
        yield new
        written = [new]
        if new.is_dir():
            written = [*new.iterdir(), new]
        for entry in written:
            if private:
                entry.chmod(0o700 if entry.is_dir() else 0o600)
            if durable:
                sync(entry)
        if new.is_dir():  # `os.replace` puts a folder only in the place of an empty one
            remove(path)
        os.replace(new, path)
        if durable:
            sync(path.parent)
    except OSError as error:
        # "no space left on device" names no file. An error without a number is left alone: with a
        # file name its text would be lost
        if error.errno:
            error.filename = error.filename or str(path)
        raise
    finally:
        remove(temporary)


def make_private(folder: Path) -> None:
    """Make ``folder`` and what is missing above it, for this user only.

    Folders that are there stay as they are.
    """
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    for place in reversed(missing):
        place.mkdir(mode=0o700, exist_ok=True)


def is_private(folder: Path) -> bool:
    """Return whether the folder is this user's, and no other user may look into it."""
    facts = folder.stat()
    return facts.st_uid == os.geteuid() and not facts.st_mode & 0o077


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Replace ``path`` in one step, as `replacing` does; OSError leaves it as it was."""
    with replacing(path, private=private) as beside:
        beside.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk.

    Without this a power cut may undo what was written first, and keep what was written after it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_disk_of(path: Path) -> None:
    """Wait until all that was written to the disk of ``path`` has reached it.

    Only Linux can wait for a single disk; elsewhere it is all disks, one of which may hang.
    """
    if sys.platform != "linux":
        os.sync()
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_leftovers(folder: Path, name_pattern: str = "*") -> None:
    """Remove the temporary files that killed processes were writing by `replacing`.

    ``name_pattern`` is a glob pattern of the names that were to be replaced. Other ``.tmp`` files
    stay.
    """
    eight_digits = "[0-9a-f]" * 8  # which `replacing` puts into its temporary names
    for leftover in folder.glob(f"{name_pattern}.{eight_digits}.tmp"):
        remove(leftover)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of ``path`` inside the ``with`` statement; other processes wait for it.

    A process that dies loses the lock. What such a process was writing to ``path`` is removed
    before the block begins. OSError for a folder that may not be written to.
    """
    from filelock import FileLock

    make_private(path.parent)
    with FileLock(path.with_name(f"{path.name}.lock")):
        remove_leftovers(path.parent, escape(path.name))
        yield


def digest(*parts: object) -> str:
    """Return 16 hexadecimal digits that stand for ``parts``: plain values, or else their `repr`."""
    return hashlib.sha256(json.dumps(parts, default=repr).encode()).hexdigest()[:16]


def cache_folder(cache_dir: str) -> Path:
    """Return the folder of the setting ``cache-dir``; if that is "", one in the user's caches."""
    if cache_dir:
        return Path(cache_dir).expanduser().absolute()
    users_caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(users_caches, "protofl")
