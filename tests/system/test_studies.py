"""Two studies over three sites, as real processes: who takes part, who is asked for nothing, what is on record."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.operators import PROTOFL, done, operators, study
from tests.support.processes import superlink, supernode

pytestmark = pytest.mark.system
SITES = ("east", "north", "south")


def facts(folder: Path, site: str) -> str:
    drawn = np.random.default_rng(SITES.index(site)).normal(size=(40, 2))
    rows = [f"{('sick', 'well')[i % 2]},{x:.3f},{y + i % 2:.3f}" for i, (x, y) in enumerate(drawn)]
    (data := folder / f"{site}.csv").write_text("\n".join(["label,x,y", *rows]))
    said = f'site-name="{site}" data-dir="{data}" dataset="arrays" classes="sick,well"'
    return said + f' state-dir="{folder / site / "state"}" cache-dir="{folder / site / "cache"}"'


def entries(folder: Path, site: str) -> list[dict[str, Any]]:
    log = folder / site / "state/sites" / site / "audit.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_two_studies_ask_only_their_own_sites_and_leave_a_log_that_holds(tmp_path: Path) -> None:
    nodes = {site: facts(tmp_path, site) for site in SITES}
    keys = {site: done(tmp_path, "key", "--node-config", node).strip() for site, node in nodes.items()}
    pair = study(tmp_path, "pair", {site: keys[site] for site in ("north", "south")}, "study-runs = 1")
    everybody = study(tmp_path, "everybody", keys, "secagg = true")
    with ExitStack() as running:
        link = running.enter_context(superlink(tmp_path))
        for site, node in nodes.items():
            running.enter_context(supernode(link, tmp_path / site, node, (PROTOFL, "site", "run")))
        with operators(tmp_path, nodes):
            output, status = link.run("--run-config", str(pair))
            assert status == "finished:completed", output
            output, status = link.run("--run-config", str(everybody))
            assert status == "finished:completed", output
        changed = tmp_path / "changed.toml"
        changed.write_text(everybody.read_text().replace("rounds = 1", "rounds = 2"))
        output, status = link.run("--run-config", str(changed))
        assert (status, "study-signature: not jane:" in output) == ("finished:failed", True), output
        again = tmp_path / "again.toml"
        again.write_text(pair.read_text().replace('run-name = "pair"', 'run-name = "again"'))
        output, status = link.run("--run-config", str(again))
        assert (status, "takes part in 1 runs of study pair" in output) == ("finished:failed", True), output
    for run, sites in (("pair", {"north", "south"}), ("everybody", set(SITES))):
        folder = tmp_path / "runs" / run
        assert set(json.loads((folder / "summary.json").read_text())["clients"]) == sites
        for site in sites:
            assert "each follows the one before it" in done(
                tmp_path, "audit", "--against", str(folder), "--node-config", nodes[site]
            )
    studies = {entry["study"]: entry for entry in entries(tmp_path, "north") if entry.get("decision")}
    of_pair = next(iter(studies))
    asked_of_east = [entry for entry in entries(tmp_path, "east") if entry["study"] == of_pair]
    assert asked_of_east
    assert all("does not name east" in entry["refused"] for entry in asked_of_east)
