"""Sites with data of their own."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from PIL import Image

from client_app.site.consent import site_key
from protofl_common.experiment.study import key_as_text, signed_part
from protofl_common.tools.cli import parser_of
from protofl_common.tools.findings import Finding
from protofl_common.tools.site.check import findings
from protofl_common.tools.site.node import node_config
from tests.support.harness import CACHE, LocalGrid, Tamper, run_config, run_federation


def write_images(folder: Path, *names: str) -> Path:
    """Write random images of 8×8 pixels under these names; return the folder."""
    for index, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(index).integers(0, 255, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
    return folder


NAMES = ("east", "north", "south")
EAST = 1
NORTH = 2
SOUTH = 3
"""The nodes of the sites with these names in `Three`."""
CLASSES = ("benign", "malignant")
FILES = [f"benign/{i}.png" for i in range(4)] + [f"malignant/{i}.png" for i in range(4)]


class Three:
    """Three sites, unless ``names`` says others, with eight images each.

    Tests do something to the site south before a run.
    """

    def __init__(self, folder: Path, names: Sequence[str] = NAMES) -> None:
        self.folder = folder
        self.nodes: dict[int, dict[str, Any]] = {}
        for number, name in enumerate(names, start=1):
            self.nodes[number] = {
                "site-name": name,
                "dataset": "image-folder",
                "classes": ",".join(CLASSES),
                "data-dir": str(write_images(folder / name / "data", *FILES)),
                "state-dir": str(folder / name / "state"),
                "cache-dir": str(folder / name / "cache"),
            }

    @property
    def south(self) -> Path:
        return self.folder / "south"

    def run(
        self,
        tamper: Tamper | None = None,
        on_grid: Callable[[LocalGrid], None] | None = None,
        **settings: Any,
    ) -> Any:
        own = {"partition": "own", "image_size": 8, "num_clients": 3, "train_samples": 0}
        config = run_config(self.folder, **{"models": "cnn4", "rounds": 1, **own, **settings})
        return run_federation(config, nodes=self.nodes, tamper=tamper, on_grid=on_grid)


NODE = 'site-name="north" data-dir="data" dataset="image-folder" classes="cat,dog" '
NODE += 'cache-dir="cache" state-dir="state" allow-algorithms="fedproto"'


def findings_of_check(*options: str, node: str = NODE, **asked: str | int) -> list[Finding]:
    """Return what ``protofl site check`` finds about a run with the settings ``asked``."""
    arguments = parser_of("site").parse_args(["check", "--node-config", node, *options])
    run_settings = {key.replace("_", "-"): value for key, value in asked.items()}
    return findings(arguments, node_config(arguments.node_config), run_settings)


def level_of(said: list[Finding], text: str) -> str:
    """Return the level (`WRONG`, `WARNING` or `FACT`) of the one finding that holds a text."""
    (level,) = [finding.level for finding in said if text in f"{finding.topic} {finding.text}"]
    return level


def real_sites(number: int, disk: Path | None = None, **more: Any) -> dict[int, dict[str, Any]]:
    """Return the node configs of sites 1000, 1001, … that divide a data set among them.

    A node with a name is a site with an operator, and no simulated client. The n-th keeps its
    state in the folder ``disk``-n, if one is given. ``more`` stands in every node config.
    """
    nodes = {}
    for n in range(number):
        node = {"site-name": f"site-{n}", "partition-id": n, "num-partitions": number}
        if disk:
            node["state-dir"] = f"{disk}-{n}"
        nodes[1000 + n] = {**node, **CACHE, **more}
    return nodes


JANE = Ed25519PrivateKey.from_private_bytes(b"j" * 32)


def make_site_keys(**folders: Path) -> str:
    """Let each site that has no key yet make one in its state folder: site -> the folder.

    Return the setting study-sites with the sites' keys, ``name:public key,…``.
    """
    sites = []
    for site, folder in folders.items():
        key = site_key(folder, make=True).public_key()
        sites.append(f"{site}:{key_as_text(key)}")
    return ",".join(sites)


def signed(config: dict[str, Any], **study: Any) -> dict[str, Any]:
    """Return the settings as those of the study "heart", which Jane has signed.

    ``study`` are further settings of the study, without their prefix.
    """
    config = {**config, "study": "heart", "study-by": f"jane:{key_as_text(JANE.public_key())}"}
    for key, value in study.items():
        config[f"study-{key}"] = value
    return config | {"study-signature": JANE.sign(signed_part(config)).hex()}
