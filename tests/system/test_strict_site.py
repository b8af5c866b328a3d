"""Sites with every key of the node config and both demands, in a study that their operators approve while it waits."""

import json
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from protofl_common.experiment.node import NODE_KEYS, PARTITION_KEYS
from protofl_common.tools.site.node import node_config
from tests.support.operators import PROTOFL, done, operators, study
from tests.support.processes import superlink, supernode

pytestmark = pytest.mark.system
SITES = ("east", "north", "south")


def facts(folder: Path, site: str) -> str:
    """The node config of a site, as its operator types it; its columns are of patients of one ward."""
    drawn = np.random.default_rng(SITES.index(site)).normal(size=(60, 3))
    rows = [
        f"{('sick', 'well')[i % 2]},ward,{x:.3f},{y + i % 2:.3f},{z:.3f}"
        for i, (x, y, z) in enumerate(drawn)
    ]
    (data := folder / f"{site}.csv").write_text("\n".join(["label,client,x,y,z", *rows]))
    said = f'site-name="{site}" data-dir="{data}" dataset="arrays" classes="sick,well" domain="ward" image-size=0'
    said += ' text-length=64 test-from="split" train-fraction=0.8 validation-fraction=0.1 arch="mlp-1" device="cpu"'
    said += f' state-dir="{folder / site / "state"}" cache-dir="{folder / site / "cache"}"'
    said += ' approve=true allow-download=false allow-backbones="" allow-python="" allow-algorithms="fedproto,fedavg"'
    said += " max-rounds=2 max-epochs=2 max-steps=1000 max-batch-size=256 max-image-size=64 max-text-length=64"
    said += ' min-class-samples=5 allow-arch="" columns="x,y,z" drop="" one-hot="" impute="none" standardise="auto"'
    return said + ' require-secagg=true require-dp="epsilon<=8 delta<=1e-4"'


def test_sites_with_all_keys_and_both_demands_take_part_in_what_is_approved(tmp_path: Path) -> None:
    """They are started in folders with modules of the same names as the project's: no line of these runs."""
    nodes = {site: facts(tmp_path, site) for site in SITES}
    assert {*node_config(nodes["north"]), *PARTITION_KEYS} == {*NODE_KEYS}
    (tmp_path / "node.toml").write_text(
        "\n".join(f"{k} = {json.dumps(v)}" for k, v in node_config(nodes["east"]).items())
    )
    nodes["east"] = str(tmp_path / "node.toml")
    strange = tmp_path / "work"
    for module in ("protofl_common", "client_app"):
        (strange / module).mkdir(parents=True)
        (strange / module / "__init__.py").write_text(
            "import pathlib; pathlib.Path('was-here').touch()"
        )
    keys = {
        site: done(tmp_path, "key", "--node-config", node).strip() for site, node in nodes.items()
    }
    strict = study(tmp_path, "strict", keys)
    with ExitStack() as running:
        link = running.enter_context(superlink(tmp_path))
        for site, node in nodes.items():
            running.enter_context(
                supernode(link, tmp_path / site, node, (PROTOFL, "site", "run"), cwd=strange)
            )
        running.enter_context(operators(tmp_path, nodes))
        output, status = link.run("--run-config", str(strict))
        assert status == "finished:completed", output
        logs = "\n".join((tmp_path / site / "supernode.log").read_text() for site in SITES)
    summary = json.loads((tmp_path / "runs/strict/summary.json").read_text())
    assert set(summary["clients"]) == set(SITES)
    assert {client["domain"] for client in summary["clients"].values()} == {"ward"}
    assert sum(summary["trouble"].values()) == 0, output + logs
    assert not list(tmp_path.rglob("was-here"))
    ignored = "seed, train-samples, train-fraction, validation-fraction"
    assert logs.count(f"this site divides its own data, and ignores the run's {ignored}") == 3
    for site in SITES:
        ledgers = list((tmp_path / site / "state/privacy").glob("*.json"))
        assert len(ledgers) == 2  # of the site's name, and of its data
        runs = [[name.split()[0] for name in json.loads(ledger.read_text())] for ledger in ledgers]
        assert runs == 2 * [["strict"]]
        checked = done(
            tmp_path,
            "audit",
            "--against",
            str(tmp_path / "runs/strict"),
            "--node-config",
            nodes[site],
        )
        assert "approved by" in checked
        assert "each follows the one before it" in checked
        assert "strict" in done(tmp_path, "status", "--node-config", nodes[site])
        assert "removed strict" in done(
            tmp_path, "purge", "strict", "caches/", "--node-config", nodes[site]
        )
        assert not list((tmp_path / site).rglob("*.safetensors"))
        assert all(ledger.exists() for ledger in ledgers)
    fitting = "partition=own norm=group models=mlp-1 secagg=true dp=sample dp-delta=1e-4 rounds=1 local-epochs=1"
    fitting += " batch-size=16 eval-batch-size=64"
    checked = done(tmp_path, "check", *fitting.split(), "--node-config", nodes["north"])
    assert "WRONG" not in checked
    assert "12 test samples, 2 classes: sick, well" in checked
