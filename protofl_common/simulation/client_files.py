"""A client's folder on its way to another machine and back: what has changed in it."""

import fcntl
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from protofl_common.basics.files import replacing

IN_USE = "in-use"
"""The file beside copies that all processes which use them lock."""
Listing = Mapping[str, tuple[int, int, int]]
"""Name of a file -> its inode, size and time: another one where it has been written again."""


@dataclass(frozen=True)
class ClientFiles:
    """The files of a folder, and the content of those that its copy elsewhere lacks."""

    names: frozenset[str] = frozenset()
    content: Mapping[str, bytes] = field(default_factory=dict)

    @classmethod
    def since(cls, folder: Path, known: Listing) -> "ClientFiles":
        """Read those files of a folder that its copy elsewhere lacks, or has as they were before.

        ``known`` lists the files as the copy has them.
        """
        listing = listed(folder)
        content = {}
        for name, version in listing.items():
            if known.get(name) != version:
                content[name] = (folder / name).read_bytes()
        return cls(frozenset(listing), content)

    def put_into(self, folder: Path) -> None:
        """Make ``folder`` a copy of the folder that these files were read from.

        It writes the files that ``folder`` lacked or had in an older version, which are all that
        `content` has, and removes those that the other folder does not have.
        """
        for name, content in self.content.items():
            with replacing(folder / name, private=True, durable=False) as beside:
                beside.write_bytes(content)
        for name in listed(folder).keys() - self.names:
            (folder / name).unlink()


def listed(folder: Path) -> Listing:
    """List the files of a folder, each with what changes when it is written again.

    {} if there is no such folder.
    """
    if not folder.is_dir():
        return {}
    files = {}
    for path in folder.iterdir():
        if path.is_file():
            facts = path.stat()
            files[path.name] = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
    return files


def remove_abandoned(folder: Path) -> None:
    """Remove the copies below ``folder`` whose processes have all ended, as by a kill or Ctrl-C."""
    for file in folder.glob(f"protofl-*/{IN_USE}"):
        # OSError if the copies are another user's, or a process still has the lock
        with suppress(OSError), open(file, opener=_without_waiting) as in_use:
            fcntl.flock(in_use, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(file.parent)


def _without_waiting(path: str, flags: int) -> int:
    """Open a file, and do not wait if it is a FIFO, which another user may have put there."""
    return os.open(path, flags | os.O_NONBLOCK)
