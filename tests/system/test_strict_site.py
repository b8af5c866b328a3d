"""Sites with every key of the node config and both demands.

Their operators approve a study while it waits.
"""

import json
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from protofl_common.experiment.node import NODE_KEYS, PARTITION_KEYS
from protofl_common.tools.site.node import node_config
from tests.support.operators import PROTOFL, operators, run_site_command, write_study
from tests.support.processes import superlink, supernode

pytestmark = pytest.mark.system
SITES = ("east", "north", "south")


def write_site(folder: Path, site: str) -> str:
    """Write a table of 60 patients, and return the site's node config as its operator types it.

    It has every key but peers and those of partitions.
    """
    values = np.random.default_rng(SITES.index(site)).normal(size=(60, 3))
    lines = ["label,client,x,y,z"]
    for i, (x, y, z) in enumerate(values):
        label = ("sick", "well")[i % 2]
        lines.append(f"{label},ward,{x:.3f},{y + i % 2:.3f},{z:.3f}")
    data = folder / f"{site}.csv"
    data.write_text("\n".join(lines))

    own = folder / site
    return " ".join(
        [
            f'site-name="{site}" data-dir="{data}" dataset="arrays" classes="sick,well"',
            'domain="ward" image-size=0 text-length=64 test-from="split"',
            'train-fraction=0.8 validation-fraction=0.1 arch="mlp-1" device="cpu"',
            f'state-dir="{own / "state"}" cache-dir="{own / "cache"}"',
            'approve=true allow-download=false allow-backbones="" allow-python=""',
            'allow-algorithms="fedproto,fedavg" allow-arch=""',
            "max-rounds=2 max-epochs=2 max-steps=1000 max-batch-size=256",
            "max-image-size=64 max-text-length=64 min-class-samples=5 accept-weights=true",
            'max-evaluations=9 max-honest-sites=1 operators="" on-request=""',
            'on-trouble="" max-unreadable=0',
            'label-map="" uncertain="refuse"',
            'columns="x,y,z" drop="" one-hot="" impute="none" standardise="auto"',
            'require-secagg=true require-dp="epsilon<=8 delta<=1e-4"',
        ]
    )


def strange_folder(folder: Path) -> Path:
    """Make a folder with modules of the same names as the project's, which leave a trace.

    Python would import them first if it looked for modules in the working directory.
    """
    for module in ("protofl_common", "client_app"):
        (folder / module).mkdir(parents=True)
        code = "import pathlib; pathlib.Path('was-here').touch()"
        (folder / module / "__init__.py").write_text(code)
    return folder


def test_sites_with_all_keys_and_both_demands_take_part_in_what_is_approved(tmp_path: Path) -> None:
    """They are started in folders with modules named as the project's: no line of these runs."""
    nodes = {site: write_site(tmp_path, site) for site in SITES}
    keys = {}
    for site, node in nodes.items():
        keys[site] = run_site_command(tmp_path, "key", "--node-config", node).strip()
    nodes = {site: f'{node} peers="{",".join(keys.values())}"' for site, node in nodes.items()}
    assert {*node_config(nodes["north"]), *PARTITION_KEYS} == {*NODE_KEYS}
    # east's operator gives a file in the place of words
    file = tmp_path / "node.toml"
    lines = [f"{key} = {json.dumps(value)}" for key, value in node_config(nodes["east"]).items()]
    file.write_text("\n".join(lines))
    nodes["east"] = str(file)
    strict = write_study(tmp_path, "strict", keys)
    strange = strange_folder(tmp_path / "work")

    with ExitStack() as running:
        link = running.enter_context(superlink(tmp_path))
        program = (PROTOFL, "site", "run")
        for site, node in nodes.items():
            running.enter_context(supernode(link, tmp_path / site, node, program, cwd=strange))
        running.enter_context(operators(tmp_path, nodes))
        output, status = link.run("--run-config", str(strict))
        assert status == "finished:completed", output
        logs = "\n".join((tmp_path / site / "supernode.log").read_text() for site in SITES)

    run = tmp_path / "runs" / "strict"
    summary = json.loads((run / "summary.json").read_text())
    assert set(summary["clients"]) == set(SITES)
    assert {client["domain"] for client in summary["clients"].values()} == {"ward"}
    assert sum(summary["trouble"].values()) == 0, output + logs
    assert not list(tmp_path.rglob("was-here"))
    ignored = "seed, train-samples, train-fraction, validation-fraction"
    assert logs.count(f"this site divides its own data, and ignores the run's {ignored}") == 3
    for site, node in nodes.items():
        assert_what_the_operator_sees(tmp_path, site, node, run)

    settings = "partition=own norm=group models=mlp-1 secagg=true dp=sample dp-delta=1e-4 rounds=1 "
    settings += "local-epochs=1 batch-size=16 eval-batch-size=64"
    checked = run_site_command(
        tmp_path, "check", *settings.split(), "--node-config", nodes["north"]
    )
    assert "WRONG" not in checked
    assert "12 test samples, 2 classes: sick, well" in checked  # a fifth of 60


def assert_what_the_operator_sees(folder: Path, site: str, node: str, run: Path) -> None:
    """The ledgers and the log tell of the run; what it keeps can be purged, but not the ledgers."""
    ledgers = list((folder / site / "state" / "privacy").glob("*.json"))
    assert len(ledgers) == 2  # of the site's name, and of its data
    for ledger in ledgers:
        (run_charged,) = json.loads(ledger.read_text())
        name, _number = run_charged.split()
        assert name == "strict"

    checked = run_site_command(
        folder, "audit", "--against", str(run.parent / "heads.jsonl"), "--node-config", node
    )
    assert "decision approved" in checked
    assert "each follows the one before it" in checked
    assert "strict" in run_site_command(folder, "status", "--node-config", node)

    purged = run_site_command(folder, "purge", "strict", "caches/", "--node-config", node)
    assert "removed strict" in purged
    assert not list((folder / site).rglob("*.safetensors"))
    assert all(ledger.exists() for ledger in ledgers)
