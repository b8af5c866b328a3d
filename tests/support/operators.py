"""Operators of sites who approve what waits, and studies that somebody signs.

All of them use the commands that people type.
"""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from protofl_common.config.options import Scalar
from tests.support.processes import BIN, approving, environment, output_of

PROTOFL = str(BIN / "protofl")


def operators(folder: Path, nodes: Mapping[str, str]) -> AbstractContextManager[None]:
    """Let the operators of sites with these node configs approve what waits, during a block.

    Each site's state is in ``folder/SITE/state``.
    """

    def approve(site: str, study: str) -> None:
        run_site_command(folder, "approve", study, "--node-config", nodes[site])

    return approving({site: folder / site / "state" / "sites" / site for site in nodes}, approve)


def write_study(folder: Path, name: str, sites: Mapping[str, str], **changes: Scalar) -> Path:
    """Write a study that Jane has signed, and return its file.

    Its run, ``name``, keeps what strict sites demand. ``sites``: site -> ``name:public key``.
    ``changes`` are settings, with underscores for hyphens.
    """
    settings: dict[str, Scalar] = {
        "study": name,
        "study-sites": ",".join(sites.values()),
        "study-purpose": "who is sick",
        "run-name": name,
        "out-dir": str(folder / "runs"),
        "algo": "fedproto",
        "partition": "own",
        "models": "mlp-1",
        "rounds": 1,
        "local-epochs": 1,
        "batch-size": 16,
        "eval-batch-size": 64,
        "threads": 1,
        "norm": "group",
        "join-timeout": 90.0,
        "seed": 9,
        "secagg": True,
        "train-samples": 7,
        "train-fraction": 0.5,
        "dp": "sample",
        "dp-epsilon": 8.0,
        "dp-delta": 1e-4,
        **{key.replace("_", "-"): value for key, value in changes.items()},
    }
    file = folder / f"{name}.toml"
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    file.write_text("\n".join(lines))
    env = environment(folder / "home")
    key = folder / "jane"
    if not key.exists():
        output_of(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], env)
    command = [PROTOFL, "study", "sign", str(file), "--key", str(key), "--by", "jane"]
    assert "signed by jane" in output_of(command, env)
    return file


def run_site_command(folder: Path, *words: str) -> str:
    """Run ``protofl site`` with these words, and return what it prints; it must succeed."""
    return output_of([PROTOFL, "site", *words], environment(folder / "home"), folder)
