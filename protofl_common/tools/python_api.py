"""ProtoFL from Python: a federation in this process, its results as objects.

    import protofl

    run = protofl.run(algo="fedproto", dataset="digits", partition="iid", rounds=5)
    run.accuracy, run.rounds, run.folder
    protofl.run(("inputs as an array", "labels"), algo="fedavg", models="mlp-1", clients=4)

`protofl/`, which an install copies, gives it that name. Settings are those of ``protofl run``, with
``_`` for ``-``: ``batch_size=32``; those of an algorithm as ``fedproto={"lambda": 1.0}``.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from operator import index
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
from flwr.app import Context, RecordDict

from protofl_common.basics.files import cache_folder, digest, replacing
from protofl_common.config.options import Scalar, SettingsError, flatten
from protofl_common.data.store import cached, data_key
from protofl_common.experiment.catalog import Hparams
from protofl_common.experiment.node import allow_named
from protofl_common.experiment.settings import default_run_config, with_halves
from protofl_common.runs.folder import METRICS, RoundRow, RunFolder, Summary
from protofl_common.simulation.grid import simulate
from protofl_common.tools.cli.run import check_settings
from protofl_common.wire.payloads import Payload, pack_payload
from protofl_common.wire.schema import Exchange

__all__ = ["Run", "SettingsError", "Tried", "run", "try_method"]

Data = str | Path | tuple[Any, Any]


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
        """Return the final mean over the clients, in [0, 1], for each way to predict.

        The ways are ``head`` and ``prototype``.
        """
        return {kind: figures["mean"] for kind, figures in self.summary["accuracy"].items()}

    def frame(self) -> Any:
        """Return a pandas data frame with a row for each round, client and way to predict."""
        import pandas  # type: ignore[import-untyped]

        table = []
        for row in self.rounds:
            number = row["evaluated-after-round"]
            for name, client in row["clients"].items():
                for kind, accuracy in client["accuracy"].items():
                    table.append(
                        {"round": number, "client": name, "by": kind, "accuracy": accuracy}
                    )
        return pandas.DataFrame(table)


class Tried(NamedTuple):
    """The result of one step of a client half: its loss terms, and what it would upload."""

    losses: dict[str, float]
    upload: Any


def run(
    data: Data | None = None,
    *,
    clients: int = 4,
    workers: int = 1,
    on_line: Callable[[str], None] | None = None,
    **settings: Scalar,
) -> Run:
    """Run a federation in this process, and return its results.

    SettingsError or DataError has a line for each wrong setting.

    ``data`` is a folder or file for ``data-dir``, or inputs [N, …] and labels [N]; None: what
    ``dataset`` names. So many ``clients`` divide it, and ``workers`` are the processes among which
    the clients are divided; more than 1 only before this process has computed with PyTorch.
    ``on_line`` is called with each line that ``protofl run`` would show; else none is shown.
    """
    config = _config(data, settings)
    allow_named(config)
    check_settings(config, settings)
    folder = simulate(config, index(clients), on_line or (lambda line: None), workers)
    return Run(folder)


def try_method(
    client: type,
    data: Data | None = None,
    like: str = "fedproto",
    own: Hparams | None = None,
    **settings: Scalar,
) -> Tried:
    """Train one batch with the client half ``client``, without a federation.

    Before that it receives what the server half of ``like`` begins with, and its own upload, of the
    entries that go down, so that terms of what comes have something to act on. ``like`` names the
    algorithm whose exchange the half has, and its hyper-parameters unless ``own`` are given.
    """
    with_halves()
    from client_app.client import open_client
    from client_app.introduction import card_of
    from server_app.strategies.base import server_half

    alone: dict[str, Scalar] = {
        "algo": like,
        "rounds": 1,
        "local-steps": 1,
        "partition": "iid",
        "state-dir": mkdtemp(),
    }
    config = _config(data, settings | alone)
    node: dict[str, Scalar] = {"partition-id": 0, "num-partitions": 1}
    site = open_client(Context(1, 1, node, RecordDict(), config))
    site.instructions = cast(Any, SimpleNamespace(round=1, counted=0, part=1.0))
    card = card_of(site, 0, "")
    likes_settings = site.settings
    server: Any = SimpleNamespace(settings=likes_settings, reference=card, cards={site.name: card})
    site.settings = replace(likes_settings, hparams=own or likes_settings.hparams)
    exchange = site.settings.exchange

    algorithm = client(site, 1)
    algorithm.receive(server_half(likes_settings.row)(server).payload_down())
    upload = algorithm.upload()
    pack_payload(upload, exchange.up)  # ValueError for an entry that ``like`` does not declare
    algorithm.receive(_as_download(upload, exchange))
    return Tried(algorithm.fit(), algorithm.upload())


def _as_download(upload: Payload, exchange: Exchange) -> Payload:
    """Return the entries of an upload that go down too, in the same form, and are not empty."""
    entries = {}
    for name, declared in exchange.down.items():
        if type(declared) is not type(exchange.up.get(name)):
            continue
        value = upload.entries.get(name, ())
        if len(value):
            entries[name] = value
    return Payload(**entries)


def _config(data: Data | None, settings: dict[str, Scalar]) -> dict[str, Scalar]:
    """Return a run's settings: the defaults, what names the data, and ``settings``.

    In the last a key may have ``_`` for ``-``.
    """
    dashed = {}
    for key, value in settings.items():
        is_nested = "." in key
        dashed[key if is_nested else key.replace("_", "-")] = value

    chosen = flatten(dashed)
    for key, value in chosen.items():
        if isinstance(value, np.generic):
            chosen[key] = value.item()
    of_data = _of_data(data, str(chosen.get("cache-dir", "")))
    return {**default_run_config(), "report": False, **of_data, **chosen}


def _of_data(data: Data | None, cache_dir: str) -> dict[str, Scalar]:
    """Return the settings that name the data.

    Equal arrays become one file, so that runs of them can be compared.
    """
    data_key.cache_clear()  # a file may have been changed since the run before
    if data is None:
        return {}
    if isinstance(data, (str, Path)):
        dataset = "image-folder" if Path(data).is_dir() else "arrays"
        return {"data-dir": str(data), "dataset": dataset}

    inputs = np.asarray(data[0])
    labels = np.asarray(list(data[1]))  # pandas' texts are objects
    if inputs.shape[:1] != labels.shape[:1]:
        shapes = f"inputs {list(inputs.shape)}, labels {list(labels.shape)}"
        raise SettingsError(f"data: {shapes}: each input needs a label")
    file = cache_folder(cache_dir) / f"arrays-{digest(_mark(inputs), _mark(labels))}.npz"

    def already_there() -> Path | None:
        return file if file.exists() else None

    def written() -> Path:
        with replacing(file, private=True) as beside, beside.open("wb") as opened:
            np.savez(opened, inputs=inputs, labels=labels)
        return file

    cached(file, already_there, written)
    return {"data-dir": str(file), "dataset": "arrays", "partition": "iid"}


def _mark(array: np.ndarray[Any, Any]) -> tuple[str, tuple[int, ...], str]:
    return str(array.dtype), array.shape, sha256(array.tobytes()).hexdigest()
