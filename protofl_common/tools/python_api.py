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
from protofl_common.experiment.catalog import Hparams, algorithm_named
from protofl_common.experiment.node import allow_named
from protofl_common.experiment.settings import default_run_config, with_halves
from protofl_common.runs.folder import METRICS, RoundRow, RunFolder, Summary
from protofl_common.tools.cli.run import checked
from protofl_common.tools.local import simulate
from protofl_common.wire.payloads import Payload, pack_payload

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
        """Return the rows of ``metrics.jsonl``: one for each round, and one for the final evaluation."""
        if not (rows := RunFolder(Path(self.folder)).rows()):
            raise SettingsError(f"{self.folder}: no {METRICS} with a round in it; give the folder of a run")
        return rows

    @property
    def accuracy(self) -> dict[str, float]:
        """Return the final mean over the clients for each way to predict, ``head`` or ``prototype``, in [0, 1]."""
        return {kind: figures["mean"] for kind, figures in self.summary["accuracy"].items()}

    def frame(self) -> Any:
        """Return a pandas data frame with a row for each round, client and way to predict."""
        import pandas  # type: ignore[import-untyped]

        return pandas.DataFrame(
            {"round": row["evaluated-after-round"], "client": name, "by": kind, "accuracy": accuracy}
            for row in self.rounds
            for name, client in row["clients"].items()
            for kind, accuracy in client["accuracy"].items()
        )


class Tried(NamedTuple):
    """The result of one step of a client half: the loss terms, and the payload that it would upload."""

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
    """Run a federation in this process, return its results; SettingsError or DataError: a line for each wrong setting.

    ``data`` is a folder or file for ``data-dir``, or inputs [N, …] and labels [N]; None: what ``dataset`` names.
    So many ``clients`` divide it, and ``workers`` are the processes among which the clients are divided; more than 1
    only before this process has computed with PyTorch. ``on_line`` is called with each line that ``protofl run`` would
    show; nothing is shown by default.
    """
    config = _config(data, settings)
    allow_named(config)
    checked(config, settings)
    return Run(simulate(config, index(clients), on_line or (lambda line: None), workers))


def try_method(
    client: type, data: Data | None = None, like: str = "fedproto", own: Hparams | None = None, **settings: Scalar
) -> Tried:
    """Train one batch of the data with the client half ``client``, and return what came of it: no federation.

    Before that it receives what the server half of ``like`` begins with, and its own upload, of the entries that go
    down, so that terms of what comes have something to act on. ``like`` names the algorithm whose exchange the half
    has, and its hyper-parameters unless ``own`` are given.
    """
    with_halves()
    from client_app.client import open_client
    from client_app.introduction import card_of
    from server_app.strategies.base import server_half

    alone: dict[str, Scalar] = {"algo": like, "rounds": 1, "local-steps": 1, "partition": "iid", "state-dir": mkdtemp()}
    config = _config(data, settings | alone)
    site = open_client(Context(1, 1, {"partition-id": 0, "num-partitions": 1}, RecordDict(), config))
    site.instructions = cast(Any, SimpleNamespace(round=1, counted=0, part=1.0))
    card, of_like = card_of(site, 0, ""), site.settings
    server: Any = SimpleNamespace(settings=of_like, reference=card, cards={site.name: card})
    site.settings = replace(of_like, hparams=own or of_like.hparams)
    algorithm, exchange = client(site, 1), site.settings.exchange
    algorithm.receive(server_half(of_like.row)(server).payload_down())
    pack_payload(sent := algorithm.upload(), exchange.up)  # ValueError for an entry that ``like`` does not declare
    alike = [name for name, entry in exchange.down.items() if type(entry) is type(exchange.up.get(name))]
    algorithm.receive(Payload(**{name: value for name in alike if len(value := sent.entries.get(name, ()))}))
    return Tried(algorithm.fit(), algorithm.upload())


def _config(data: Data | None, settings: dict[str, Scalar]) -> dict[str, Scalar]:
    algorithm_named.cache_clear()  # a package may have been reloaded since the run before
    chosen = flatten({key if "." in key else key.replace("_", "-"): value for key, value in settings.items()})
    chosen = {key: value.item() if isinstance(value, np.generic) else value for key, value in chosen.items()}
    return default_run_config() | {"report": False} | _of_data(data, str(chosen.get("cache-dir", ""))) | chosen


def _of_data(data: Data | None, cache_dir: str) -> dict[str, Scalar]:
    """Settings that name the data; equal arrays become one file, so that runs of them can be compared."""
    data_key.cache_clear()  # a file may have been changed since the run before
    if data is None:
        return {}
    if isinstance(data, (str, Path)):
        return {"data-dir": str(data), "dataset": "image-folder" if Path(data).is_dir() else "arrays"}
    inputs, labels = np.asarray(data[0]), np.asarray(list(data[1]))  # pandas' texts are objects
    if inputs.shape[:1] != labels.shape[:1]:
        raise SettingsError(f"data: inputs {list(inputs.shape)}, labels {list(labels.shape)}: each input needs a label")
    marks = [(str(of.dtype), of.shape, sha256(of.tobytes()).hexdigest()) for of in (inputs, labels)]
    file = cache_folder(cache_dir) / f"arrays-{digest(*marks)}.npz"

    def written() -> Path:
        with replacing(file, private=True) as beside, beside.open("wb") as opened:
            np.savez(opened, inputs=inputs, labels=labels)
        return file

    cached(file, lambda: file if file.exists() else None, written)
    return {"data-dir": str(file), "dataset": "arrays", "partition": "iid"}
