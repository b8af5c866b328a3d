"""ProtoFL from Python: a federation in this process, its results as objects.

    import protofl

    run = protofl.run(algo="fedproto", dataset="digits", partition="iid", rounds=5)
    run.accuracy, run.rounds, run.folder
    protofl.run(("inputs as an array", "labels"), algo="fedavg", models="mlp-1", clients=4)

`protofl/`, which an install copies, gives it that name. Settings are those of ``protofl run``, with
``_`` for ``-``: ``batch_size=32``; those of an algorithm as ``fedproto={"lambda": 1.0}``.
"""

from dataclasses import dataclass, replace
from hashlib import sha256
from io import BytesIO
from operator import index
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Context, RecordDict
from pyarrow import parquet

from protofl_common.algorithms.base import Hparams
from protofl_common.basics.files import cache_folder, replacing
from protofl_common.config.options import Config, Scalar, SettingsError, flatten
from protofl_common.data.door import as_array
from protofl_common.data.objects import TAKEN, as_arrays, is_frame, joined_frames
from protofl_common.data.raw import DataError
from protofl_common.data.store import data_key, open_data
from protofl_common.data.table import arrow_of
from protofl_common.experiment.catalog import with_hparams
from protofl_common.experiment.node import allow_named
from protofl_common.experiment.settings import Settings, default_run_config, with_halves
from protofl_common.report import paper as figures
from protofl_common.runs import events
from protofl_common.runs.folder import METRICS, RoundRow, RunFolder, Summary
from protofl_common.simulation.grid import LocalGrid, simulate
from protofl_common.simulation.machine import CLUSTER, engine_for
from protofl_common.tools.arguments import check_settings
from protofl_common.wire.payloads import Payload, pack_payload
from protofl_common.wire.schema import Exchange

__all__ = ["Run", "SettingsError", "Tried", "events", "figures", "run", "try_method"]

Data = Any
"""The path of a file or folder, or an object of those that `TAKEN` names."""


@dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: Path

    @property
    def summary(self) -> Summary:
        return RunFolder(Path(self.folder)).finished_summary()

    @property
    def rounds(self) -> list[RoundRow]:
        """Return the rows of ``metrics.jsonl``: one for each round, and the final evaluation."""
        rows = RunFolder(Path(self.folder)).rows()
        if not rows:
            raise SettingsError(
                f"{self.folder}: no {METRICS} with a round in it; give the folder of a run"
            )
        return rows

    @property
    def accuracy(self) -> dict[str, float]:
        """Return the final accuracy by ``head`` and ``prototype``: client means in [0, 1]."""
        return {kind: figures["mean"] for kind, figures in self.summary["accuracy"].items()}

    def frame(self) -> Any:
        """Return a pandas data frame with a row for each round, client, and head or prototype."""
        import pandas  # type: ignore[import-untyped]

        table = []
        for row in self.rounds:
            number = row["evaluated-after-round"]
            for name, client in row["clients"].items():
                for kind, accuracy in client["accuracy"].items():
                    table.append((number, name, kind, accuracy))
        return pandas.DataFrame(table, columns=["round", "client", "by", "accuracy"])


class Tried(NamedTuple):
    """The result of one step of a client half."""

    losses: dict[str, float]  # by loss term
    upload: Any  # the Payload that it would upload


def run(
    data: Data | None = None,
    *,
    clients: int = 4,
    workers: int = 1,
    cluster: str = "",
    on_event: events.OnEvent | None = None,
    **settings: Scalar,
) -> Run:
    """Run a federation in this process, and return its results.

    ``data`` is a folder or file for ``data-dir``, a pair of inputs [N, …] and labels [N], or
    another object of `TAKEN`; None: what ``dataset`` names. It is divided among so many
    ``clients``. They are simulated by so many ``workers``, processes of this machine; there can be
    several only before this process has computed with PyTorch. With ``cluster``, the address
    HOST:PORT of a Ray cluster's head, its nodes simulate them instead.
    ``on_event`` is called with each of `protofl.events`; ``on_event=print`` shows the lines of
    ``protofl run``, and without it nothing is shown.

    SettingsError with a line for each wrong setting; DataError for data that cannot be read.
    """
    number_of_clients = _at_least_one("clients", clients)
    number_of_workers = _at_least_one("workers", workers)
    config = _config(data, _by_key(settings))
    allow_named(config)
    # runs of several algorithms may share their tables, of which each run uses one: the others
    # need not have an effect
    without_tables = {key: value for key, value in settings.items() if not isinstance(value, dict)}
    checked = check_settings(config, _by_key(without_tables))
    # several workers need a process without PyTorch (see above)
    if data is not None and number_of_workers == 1:
        _check_data(data, checked)
    connected = None
    if cluster:
        _, connected = engine_for({CLUSTER: cluster}, str(config["device"]))
    on_event = on_event or (lambda event: None)
    folder = simulate(config, number_of_clients, on_event, number_of_workers, cluster=connected)
    return Run(folder)


def _at_least_one(name: str, number: int) -> int:
    """Return the number as an int; SettingsError below 1, TypeError for a float."""
    number = index(number)  # takes an integer of NumPy, too
    if number < 1:
        raise SettingsError(f"{name} = {number}: must be at least 1")
    return number


def _check_data(data: Data, settings: Settings) -> None:
    """Raise DataError, before the run starts, for data that cannot be read.

    For objects in Python its text says "data", not the name of the file that they were stored in.
    """
    try:
        open_data(settings.data)
    except DataError as error:
        if isinstance(data, (str, Path)):
            raise
        raise DataError(str(error).replace(settings.data.data_dir, "data")) from error


def try_method(
    client: type,
    data: Data | None = None,
    like: str = "fedproto",
    own: Hparams | None = None,
    **settings: Scalar,
) -> Tried:
    """Train one batch with the client half ``client``, without a federation.

    ``like`` names the algorithm whose exchange the half has, and its hyper-parameters unless
    ``own`` are given. Before it trains, the half receives what the server half of ``like`` sends in
    the first round, and then the entries of its own upload that this algorithm also sends down, so
    that loss terms on what the server sends have something to act on.

    ValueError for an upload with an entry that ``like`` does not declare.
    """
    with_halves()
    from client_app.introduction import card_of
    from client_app.site.client import open_client
    from client_app.site.workshop import open_workshop
    from server_app.network.membership import Federation
    from server_app.run.checkpoint import Checkpoint
    from server_app.strategies.base import server_half

    for_one_client: Config = {
        "algo": like,
        "rounds": 1,
        "local-steps": 1,
        "partition": "iid",
        "state-dir": mkdtemp(),
    }
    config = _config(data, _by_key(settings | for_one_client))

    # the only client of a run, in its first round
    node: Config = {"partition-id": 0, "num-partitions": 1}
    context = Context(run_id=1, node_id=1, node_config=node, state=RecordDict(), run_config=config)
    site = open_client(context)
    settings_of_like = site.settings
    client_settings = replace(settings_of_like, hparams=own or settings_of_like.hparams)
    first_round = replace(site.instructions, round=1)
    work = open_workshop(replace(site, settings=client_settings, instructions=first_round))

    # a server without connections, to which the client has introduced itself
    start = Checkpoint(config, first_round.run_history)
    grid = LocalGrid(config, nodes={}, run_id=1)
    federation = Federation(grid, settings_of_like, start, baseline="")
    federation.cards[site.name] = card_of(work, parameters=0, weights="")
    exchange = settings_of_like.exchange

    algorithm = client(work, 1)  # round 1
    server = server_half(settings_of_like.row)(federation)
    algorithm.receive(server.payload_down())
    upload = algorithm.upload()
    pack_payload(upload, exchange.up)  # for its ValueError
    algorithm.receive(_as_download(upload, exchange))
    return Tried(algorithm.fit(), algorithm.upload())


def _as_download(upload: Payload, exchange: Exchange) -> Payload:
    """Return those entries of an upload that the server also sends, as the next round's download.

    Empty entries are left out, and those that the server sends as another type of entry.
    """
    entries = {}
    for name, declared in exchange.down.items():
        if type(declared) is not type(exchange.up.get(name)):
            continue
        value = upload.entries.get(name, ())  # () if the half has not uploaded it
        if len(value):
            entries[name] = value
    return Payload(**entries)


def _by_key(settings: Config) -> Config:
    """Return settings by the keys that they have everywhere else.

    Here ``_`` may stand for ``-``, and the settings of an algorithm may be a dictionary.
    """
    dashed = {}
    for key, value in settings.items():
        is_nested = "." in key  # ``fedproto.lambda`` is written as it is
        dashed[key if is_nested else key.replace("_", "-")] = value

    chosen = flatten(dashed)
    for key, value in chosen.items():
        if isinstance(value, np.generic):  # a number of NumPy
            chosen[key] = value.item()
    return chosen


def _config(data: Data | None, chosen: Config) -> Config:
    """Return a run's whole config: the defaults, the settings that name ``data``, and the chosen.

    Where they differ, the ``chosen`` ones win. No report is written unless they ask for one.
    Objects in Python are stored in a file of the cache folder.
    """
    data_settings = _settings_of_data(data, str(chosen.get("cache-dir", "")))
    return with_hparams({**default_run_config(), "report": False, **data_settings, **chosen})


def _settings_of_data(data: Data | None, cache_dir: str) -> Config:
    """Return the settings that name the data; {} for None.

    Objects in Python are stored in a file of the cache folder. Its name depends on their content
    alone, so that runs of equal data can be compared.
    """
    data_key.cache_clear()  # a file may have been changed since the run before
    if data is None:
        return {}
    if isinstance(data, (str, Path)):
        dataset = "image-folder" if Path(data).is_dir() else "arrays"
        return {"data-dir": str(data), "dataset": dataset}

    content, suffix = _as_file(data)
    file = cache_folder(cache_dir) / f"arrays-{sha256(content).hexdigest()[:16]}{suffix}"

    if not file.exists():
        with replacing(file, private=True) as temporary:  # in one step, if two processes write it
            temporary.write_bytes(content)
    return {"data-dir": str(file), "dataset": "arrays", "partition": "iid"}


def _as_file(data: Any) -> tuple[bytes, str]:
    """Return data frames and arrays as the content of a file, and the suffix of its name.

    DataError for objects that `TAKEN` does not name.
    """
    buffer = BytesIO()
    is_pair = isinstance(data, (tuple, list)) and len(data) == 2
    if is_pair and is_frame(data[0]):
        data = joined_frames(*data)
    if is_frame(data):
        parquet.write_table(arrow_of(data, "data"), buffer)
        return buffer.getvalue(), ".parquet"

    arrays = {}
    for name, value in as_arrays(data).items():
        are_inputs = name == "inputs" or name.startswith("x_")
        array = as_array(value, f"data: {name}", are_names=not are_inputs)
        if array.dtype.kind not in "biufU":  # NumPy's letters for truth values, numbers and texts
            raise DataError(f"data: {name} are {array.dtype}, no numbers or names; {TAKEN}")
        arrays[name] = array
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue(), ".npz"
