"""The cache: built once, mapped into memory, rebuilt when damaged."""

import errno
import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from protofl_common.data import open_client_data
from protofl_common.data.division import shares_of
from protofl_common.data.store import cached, data_key, open_data

from .conftest import refused


def _first(settings):
    """Return the data of the first of four clients."""
    return open_client_data(settings, seed=3, partition=0, num_partitions=4)


def test_arrays_are_mapped_and_the_clients_are_copies(data_settings):
    settings = data_settings(dataset="digits", partition="iid")
    assert isinstance(open_data(settings).inputs, np.memmap)
    client = _first(settings)
    for array in (client.train_inputs, client.train_labels, client.test_inputs, client.test_labels):
        assert type(array) is np.ndarray
        assert array.base is None
    assert client.train_labels.dtype == client.test_labels.dtype == np.int64


def test_one_division_serves_all_clients_of_a_seed(data_settings):
    settings = data_settings(dataset="digits", partition="iid")
    before = shares_of.cache_info().misses
    for number in range(4):
        open_client_data(settings, seed=5, partition=number, num_partitions=4)
        assert shares_of.cache_info().misses == before + 1
    open_client_data(settings, seed=6, partition=0, num_partitions=4)
    assert shares_of.cache_info().misses == before + 2


@pytest.mark.parametrize(
    ("name", "length", "end"),
    [
        pytest.param("inputs.npy", 5000, b"", id="cut"),
        pytest.param("inputs.npy", -1, b"", id="missing"),
        pytest.param("meta.json", 0, b'{"samples": 1797', id="half a JSON"),
        pytest.param("labels.npy", 0, b"garbage", id="garbage"),
    ],
)
def test_a_damaged_entry_of_the_cache_is_rebuilt(data_settings, tmp_path, name, length, end):
    """Of a file its first ``length`` bytes stay (-1: there is no file) and ``end`` follows."""
    settings = data_settings(dataset="digits", partition="iid", cache_dir=str(tmp_path))
    before = _first(settings)
    file = tmp_path / data_key(settings) / name
    whole = file.read_bytes()
    file.unlink()
    if length >= 0:
        file.write_bytes(whole[:length] + end)

    after = _first(settings)

    np.testing.assert_array_equal(before.train_inputs, after.train_inputs)
    np.testing.assert_array_equal(before.test_labels, after.test_labels)


def test_leftovers_are_removed_and_a_cache_that_is_a_file_is_refused(data_settings, tmp_path):
    """A killed process leaves a folder with an ending of its own beside the entry."""
    settings = data_settings(dataset="digits", partition="iid", cache_dir=str(tmp_path))
    partial = tmp_path / f"{data_key(settings)}.0a1b2c3d.tmp"
    partial.mkdir()
    (partial / "inputs.npy").write_bytes(b"half")
    assert len(_first(settings).train_labels) == 30
    assert not partial.exists()

    (tmp_path / "file").write_text("not a folder")
    with refused(r"cache-dir: .* cannot be written"):
        open_data(data_settings(dataset="digits", cache_dir=str(tmp_path / "file")))


def test_a_file_of_the_data_that_cannot_be_read_is_no_fault_of_the_cache(tmp_path):
    def build():
        raise PermissionError(errno.EACCES, "Permission denied", "photos/cat")

    with refused(r"photos/cat cannot be read \(Permission denied\)"):
        cached(tmp_path / "entry", lambda: None, build)


def _race(settings, barrier, log, results):
    """Open a client's data at the same time as another process, and note in ``log`` each reading.

    The sum of the labels goes into the queue ``results``.
    """
    from protofl_common.data import sources

    read = sources.read_digits

    def counted(these):
        with Path(log).open("a") as file:
            file.write("read\n")
        return read(these)

    sources.SOURCES["digits"] = sources.Source(counted)
    barrier.wait(timeout=30)
    results.put(int(_first(settings).train_labels.sum()))


def test_two_processes_build_the_cache_once(data_settings, tmp_path):
    """Both begin at the same moment; the log must have one reading."""
    settings = data_settings(dataset="digits", partition="iid", cache_dir=str(tmp_path / "cache"))
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(2)
    results = context.Queue()
    log = tmp_path / "log"
    workers = [
        context.Process(target=_race, args=(settings, barrier, str(log), results)) for _ in range(2)
    ]
    for worker in workers:
        worker.start()
    sums = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(timeout=60)
        assert worker.exitcode == 0
    assert sums[0] == sums[1] == int(_first(settings).train_labels.sum())
    assert log.read_text() == "read\n"
