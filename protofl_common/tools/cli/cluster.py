"""``protofl run --cluster ADDRESS``: a simulation on several machines that one Ray joins, checked before it starts.

Every machine needs this environment and checkout at the same path, the same files in ``data-dir``, and ``out-dir`` on
storage that all share: a client may be served by another machine in each round, and finds its model there.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from importlib.metadata import version
from pathlib import Path
from tempfile import NamedTemporaryFile

from protofl_common.basics.code_version import code_version
from protofl_common.config.options import Scalar, SettingsError
from protofl_common.config.sections import DataSettings
from protofl_common.data import DataError
from protofl_common.data.store import data_key
from protofl_common.experiment.settings import SITE_FOLDERS, Settings, to_run_config

CONNECTING = 10.0
"""Seconds for the first machine to answer at all."""
PATIENCE = 300.0
"""Seconds for all machines to answer: each has to list the files of ``data-dir``."""


def absolute_folders(settings: Settings) -> dict[str, Scalar]:
    """The settings that name folders: a relative one would be another on each machine."""
    config = to_run_config(settings)
    return {key: str(Path(str(config[key])).expanduser().absolute()) for key in SITE_FOLDERS if config[key]}


def check_cluster(address: str, settings: Settings) -> None:
    """Ask each machine of the Ray at ``address`` what it sees; the folders of ``settings`` are absolute.

    SettingsError where there is no such Ray, or a machine sees something else than this one.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    folder = Path(settings.run.out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECTING).close()  # Ray tries for more than five minutes
    except (OSError, ValueError) as error:
        raise SettingsError(f"--cluster {address}: no Ray at this HOST:PORT ({error})") from error
    path = {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}}
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, runtime_env=path)
        with NamedTemporaryFile("w", dir=folder, prefix=".seen-by-all-") as note:
            note.write(expected := os.urandom(8).hex())
            note.flush()
            here = seen(note.name, settings.data) | {"out-dir": expected}
            known = ray.nodes()  # type: ignore[no-untyped-call]
            nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in known if node["Alive"]}
            ask = ray.remote(num_cpus=0)(seen)
            said = [
                ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
                    note.name, settings.data
                )
                for node in nodes
            ]
            there = dict(zip(nodes.items(), ray.get(said, timeout=PATIENCE), strict=True))
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise SettingsError(f"--cluster {address}: {error}") from error
    finally:
        ray.shutdown()
    problems = [
        f"--cluster {address}: on {name} (node {node[:8]}) {key} is {found[key]!r}; here {here[key]!r}"
        for (node, name), found in there.items()
        for key in here
        if found[key] != here[key]
    ]
    if problems:
        raise SettingsError("\n".join(problems))


def seen(note: str, data: DataSettings) -> dict[str, str]:
    """Return what a machine sees: the content of the file ``note``, its code and packages, and the data set's key."""
    facts = {"code": code_version(), **{name: version(name) for name in ("flwr", "torch")}}
    try:
        facts["out-dir"] = Path(note).read_text(encoding="utf-8")
    except OSError as error:
        facts["out-dir"] = str(error)
    try:
        facts["data-dir"] = data_key(data)
    except DataError as error:
        facts["data-dir"] = str(error)
    return facts
