"""A client's folder that travels, and a cluster that is not there. `tests/system` has one."""

import os

import pytest

from protofl_common.config.options import SettingsError
from protofl_common.simulation.client_files import IN_USE, ClientFiles, listed, remove_abandoned
from protofl_common.simulation.machine import CLUSTER, engine_for
from tests.support.processes import free_port


def content_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_copy_elsewhere_becomes_the_folder_and_only_what_changed_travels(tmp_path):
    """``since`` packs what has changed since a listing, ``put_into`` unpacks it elsewhere."""
    here = tmp_path / "here"
    copy = tmp_path / "copy"

    assert ClientFiles.since(here, {}).names == frozenset()

    here.mkdir()
    (here / "1").write_bytes(b"first")
    (here / "ledger").write_bytes(b"[1]")
    ClientFiles.since(here, {}).put_into(copy)

    assert content_of(copy) == content_of(here)

    known = listed(copy)
    (copy / "1").unlink()
    (copy / "2").write_bytes(b"second")
    (tmp_path / "new").write_bytes(b"[2]")
    (tmp_path / "new").replace(copy / "ledger")  # as large as before
    back = ClientFiles.since(copy, known)

    assert back.content == {"2": b"second", "ledger": b"[2]"}

    back.put_into(here)
    assert content_of(here) == {"2": b"second", "ledger": b"[2]"}
    assert ClientFiles.since(copy, listed(copy)).content == {}


def test_what_a_killed_node_left_of_a_folder_does_not_stay(tmp_path):
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "3").write_bytes(b"of a round that did not count")
    ClientFiles(frozenset({"2"}), {"2": b"second"}).put_into(tmp_path / "copy")

    assert content_of(tmp_path / "copy") == {"2": b"second"}


def test_a_cluster_that_is_not_there_is_named_at_once():
    with pytest.raises(SettingsError, match="--cluster 'head': must be HOST:PORT"):
        engine_for({CLUSTER: "head"}, "cpu")
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(SettingsError, match=rf"--cluster {address}: .*refused.*ray start --head"):
        engine_for({CLUSTER: address}, "cpu")


def test_a_stranger_on_a_node_cannot_let_a_worker_wait(tmp_path):
    """A worker that opened a FIFO in the usual way would wait until somebody writes.

    Folders of clients that nobody uses any more are removed, whatever lies beside them.
    """
    for name in ("protofl-abandoned", "protofl-strange"):
        (tmp_path / name).mkdir()
    (tmp_path / "protofl-abandoned" / IN_USE).touch()
    os.mkfifo(tmp_path / "protofl-strange" / IN_USE)
    remove_abandoned(tmp_path)

    assert not (tmp_path / "protofl-abandoned").exists()
