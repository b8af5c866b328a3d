"""A year of hospitals under secure aggregation, with real processes.

One is away for three rounds, a fifth joins and is lost in a final evaluation, one leaves, and one
denies a second study over the same data. None of this keeps a later run from its result.
"""

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protofl_common.tools.site.approvals import decide
from protofl_common.tools.site.node import node_config
from tests.support.operators import PROTOFL, run_site_command, write_study
from tests.support.processes import Connection, approving, superlink, supernode, wait_until

pytestmark = [pytest.mark.system, pytest.mark.long]
FOUR = ("east", "north", "south", "west")
SITES = (*FOUR, "fifth")
OF_FIFTH = 3
"""How often the fifth site evaluates models for one study (max-evaluations)."""
Rows = list[dict[str, Any]]


class Year:
    """The hospitals, each with data of its own, and their runs at one SuperLink."""

    def __init__(self, folder: Path, link: Connection) -> None:
        self.folder = folder
        self.link = link
        plain = {site: self._facts(site) for site in SITES}
        self.keys = {
            site: run_site_command(folder, "key", "--node-config", node).strip()
            for site, node in plain.items()
        }
        peers = ",".join(self.keys.values())
        self.nodes = {site: f'{node} peers="{peers}"' for site, node in plain.items()}
        self.denied: set[str] = set()
        self.running: dict[str, ExitStack] = {}

    def _facts(self, site: str) -> str:
        """Write a table of 60 patients, and return the site's node config without peers."""
        values = np.random.default_rng(SITES.index(site)).normal(size=(60, 3))
        lines = ["label,x,y,z"]
        for i, (x, y, z) in enumerate(values):
            lines.append(f"{('sick', 'well')[i % 2]},{x:.3f},{y + i % 2:.3f},{z:.3f}")
        data = self.folder / f"{site}.csv"
        data.write_text("\n".join(lines))
        own = self.folder / site
        node = (
            f'site-name="{site}" data-dir="{data}" dataset="arrays" classes="sick,well"'
            f' state-dir="{own / "state"}" cache-dir="{own / "cache"}" require-secagg=true'
        )
        if site == "fifth":
            node += f" min-class-samples=2 max-evaluations={OF_FIFTH}"
        return node

    def start(self, *sites: str) -> None:
        """Start the machines of these sites, and wait until they are connected."""
        for site in sites:
            self.running[site] = ExitStack()
            program = (PROTOFL, "site", "run")
            node = supernode(self.link, self.folder / site, self.nodes[site], program)
            self.running[site].enter_context(node)
        for site in sites:
            wait_until(partial(self._is_connected, site), self.logs)

    def _is_connected(self, site: str) -> bool:
        return "SuperNode ID" in (self.folder / site / "supernode.log").read_text()

    def stop(self, *sites: str) -> None:
        for site in sites:
            self.running.pop(site).close()

    def approve(self, site: str, study_id: str) -> None:
        """Decide about a study at a site: it is approved unless the site is one that denies."""
        decision = "denied" if site in self.denied else "approved"
        decide(node_config(self.nodes[site]), study_id, decision, key_file=None)

    def submit(self, pool: ThreadPoolExecutor, name: str, sites: tuple[str, ...], **settings: Any):  # type: ignore[no-untyped-def]
        """Submit a run of a study of these sites; return the future of its output and status."""
        keys = {site: self.keys[site] for site in sites}
        usual = {"min_clients": 3, "join_timeout": 60.0, "min_wait": 4.0}
        file = write_study(self.folder, name, keys, **NO_NOISE | usual | settings)
        return pool.submit(self.link.run, "--run-config", str(file))

    def rows(self, name: str) -> Rows:
        file = self.folder / "runs" / name / "metrics.jsonl"
        if not file.exists():
            return []
        return [json.loads(line) for line in file.read_text().splitlines()]

    def logs(self) -> str:
        return "\n".join(log.read_text()[-3000:] for log in self.folder.glob("*/supernode.log"))

    def result(self, name: str, run: Future[tuple[str, str]]) -> Rows:
        """Wait until a run has ended, with a sum in every round, and return its rows."""
        output, status = run.result(timeout=400)
        assert status == "finished:completed", output + self.logs()
        rows = self.rows(name)
        assert rows[-1]["kind"] == "final"
        assert not any(row["void"] for row in rows), output + self.logs()
        assert rows[-1]["accuracy"]["head"]["mean"] > 0
        return rows


NO_NOISE: Mapping[str, Any] = {"dp": "none", "dp_epsilon": 8.0, "norm": "batch"}


@contextmanager
def hospitals(folder: Path) -> Iterator[tuple[Year, ThreadPoolExecutor]]:
    """Run a SuperLink and operators who decide during the block; sites are started in it."""
    with superlink(folder) as link, ThreadPoolExecutor() as pool:
        year = Year(folder, link)
        folders = {site: folder / site / "state" / "sites" / site for site in SITES}
        try:
            with approving(folders, year.approve):
                yield year, pool
        finally:
            year.stop(*year.running)


def valid(rows: Rows) -> list[int]:
    return [row["valid"] for row in rows]


def test_every_run_of_a_year_ends_with_a_result(tmp_path: Path) -> None:
    """The numbers are of sites whose replies count, in each round and in the final evaluation."""
    with hospitals(tmp_path) as (year, pool):
        year.start(*FOUR)

        # west is away for three rounds or more
        run = year.submit(pool, "heart-1", FOUR, rounds=12)
        wait_until(lambda: year.rows("heart-1"), year.logs)
        year.stop("west")
        wait_until(lambda: valid(year.rows("heart-1")).count(3) >= 3, year.logs)
        year.start("west")
        year.result("heart-1", run)

        # nothing of that voids the same rounds of the next run
        run = year.submit(pool, "heart-2", FOUR, rounds=5)
        rounds_and_final_evaluation = 5 + 1
        assert valid(year.result("heart-2", run)) == rounds_and_final_evaluation * [4]

        # a fifth joins; in the final evaluation of its second run it gives no more, and is lost
        year.start("fifth")
        larger = {"rounds": 3, "evaluate_every": 3}  # two evaluations each
        run = year.submit(pool, "larger", SITES, **larger)
        assert valid(year.result("larger", run)) == [5, 5, 5, 5]
        run = year.submit(pool, "larger", SITES, **larger, run_name="larger-2")
        assert valid(year.result("larger-2", run)) == [5, 5, 5, 4]
        *_rounds, final = year.rows("larger-2")
        assert "as often as max-evaluations" in str(final["failed"])

        # south leaves
        year.stop("south")
        run = year.submit(pool, "smaller", SITES, rounds=2)
        assert valid(year.result("smaller", run)) == [4, 4, 4]

        # east denies a second study over the same data
        year.denied = {"east"}
        others = ("east", "north", "west", "fifth")
        run = year.submit(pool, "lungs", others, rounds=2, algo="fedavg", seed=7)
        assert valid(year.result("lungs", run)) == [3, 3, 3]
