"""``make bench-sites``: up to how many sites a SuperLink, its worker and a ServerApp serve.

    python -m tests.bench.sites 10 50 100 300        stubs, and copies of a real reply
    python -m tests.bench.sites 100 --secagg         each stub computes its own masks

The SuperLink and the worker of docker/README.md, with TLS and with keys of sites, and so many stub
SuperNodes (`tests/support/stubs.py`). In the third round 30 % of the sites are killed
mid-round, without ``--secagg``. The door is left out, as its limits are for sites that have
addresses of their own. Prints figures; nothing here passes or fails.
"""

import json
import multiprocessing
import os
import signal
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil

from tests.bench.printing import markdown, parser_of
from tests.support.machines import README, Machines, blocks_of, write_digits
from tests.support.processes import environment, wait_until
from tests.support.stubs import Crew

SECONDS = 3.0  # that a stub seems to train
ROUNDS = 3
KILL_IN = ROUNDS  # sites are killed in the last round
PARTS = ("SuperLink", "worker", "ServerApp", "stubs")


class Server(Machines):
    """The README's SuperLink and worker, and stubs in place of the sites."""

    def serve_all(self) -> None:
        """Do the README's steps on the SuperLink's machine, and wait until it answers."""
        *setup, _ = blocks_of(README)
        for block in setup:
            if block.machine != "superlink" or "supernode register" in block.text:
                continue
            if block.service:
                self.serve("superlink", block.text)
            else:
                self.step("superlink", block.text)
        self.wait_for(self.superlink)

    def rows(self) -> list[dict[str, Any]]:
        """The rounds so far; a line that is being written is left out."""
        metrics = self.checkout("superlink") / "runs" / "sites" / "metrics.jsonl"
        if not metrics.exists():
            return []
        *lines, _ = metrics.read_text().split("\n")
        return [json.loads(line) for line in lines]

    def stubs(self, names: Sequence[str], copies: bool) -> multiprocessing.process.BaseProcess:
        """Start a process that is these sites, until the run has ended.

        ``copies``: all replies are copies of one that was really computed.
        """
        node = {
            "data-dir": str(self.folder / "data"),
            "dataset": "domain-folder",
            "classes": "0,1,2,3,4,5,6,7,8,9",
            "domain": "ward",
            "arch": "mlp-1",
            "state-dir": str(self.folder / "state"),
            "cache-dir": str(self.folder / "cache"),
            "approve": False,
        }
        certificates = self.checkout("superlink") / "certs" / "ca.crt"
        address = f"127.0.0.1:{self.superlink}"
        crew = Crew(address, certificates, node, SECONDS, copies, self.folder / f"{names[0]}.jsonl")
        process = multiprocessing.get_context("spawn").Process(target=crew.be, args=(names,))
        process.start()
        self.running.callback(process.kill)
        return process

    def messages(self) -> list[dict[str, Any]]:
        """Return what the stubs have noted of each message."""
        texts = [file.read_text() for file in self.folder.glob("site-*.jsonl")]
        return [json.loads(line) for text in texts for line in text.splitlines()]


def part_of(process: psutil.Process) -> str:
    """Return the part that a process belongs to; "" for none."""
    words = process.cmdline()
    names = [Path(word).name for word in words[:4]]
    if "flower-superlink" in names:
        return "SuperLink"
    if "worker.py" in names:
        parent = process.parent()  # of which a ServerApp is a copy
        is_forked = parent is not None and words == parent.cmdline()
        return "ServerApp" if is_forked else "worker"
    if "protofl" in names and "worker" in names:
        return "worker"
    return "stubs" if any("multiprocessing.spawn" in word for word in words) else ""


class Load(threading.Thread):
    """Watches the memory and the processor time of each part, twice a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak: dict[str, float] = defaultdict(float)  # Part -> bytes
        self.samples: list[tuple[float, dict[str, float]]] = []  # when, part -> CPU seconds so far

    def run(self) -> None:
        """Note the CPU time and the largest memory of each part, twice a second."""
        of_process: dict[int, tuple[str, float]] = {}
        while True:
            memory: dict[str, float] = defaultdict(float)
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    part = part_of(process)
                    of_process[process.pid] = (part, sum(process.cpu_times()[:2]))
                    memory[part] += process.memory_info().rss
            used: dict[str, float] = defaultdict(float)
            for part, seconds in of_process.values():
                used[part] += seconds
            self.samples.append((time.time(), used))
            for part, size in memory.items():
                self.peak[part] = max(self.peak[part], size)
            time.sleep(0.5)

    def between(self, begin: float, end: float) -> dict[str, float]:
        """Return the CPU seconds of each part in a span of time."""
        before = max((sample for sample in self.samples if sample[0] <= begin), key=lambda s: s[0])
        after = max((sample for sample in self.samples if sample[0] <= end), key=lambda s: s[0])
        return {part: after[1][part] - before[1][part] for part in PARTS}


def measure(sites: int, secagg: bool, folder: Path, settings: str) -> list[str]:
    """Make a run with so many sites; return the cells of its row in the table."""
    write_digits(folder / "data" / "ward", slice(0, 60))
    names = [f"site-{number}" for number in range(sites)]
    doomed = [] if secagg else names[: sites * 3 // 10]  # 30 %, which are killed
    config = (
        f'algo="fedproto" partition="own" image-size=28 rounds={ROUNDS} local-epochs=1 threads=1'
        f' num-clients={sites} join-timeout=1800.0 round-timeout=1200.0 run-name="sites"'
        f" secagg={str(secagg).lower()} {settings}"
    )
    with ExitStack() as running:
        server = Server(folder, running)
        server.serve_all()
        server.stubs(names[len(doomed) :], copies=not secagg)
        victims = server.stubs(doomed, copies=True) if doomed else None
        load = Load()
        load.start()
        online = (
            f'test "$(flwr supernode list federation --format json | grep -c online)" -ge {sites}'
        )
        wait_until(lambda: server.run("superlink", online).returncode == 0, server.logs, 900, 2)

        server.step("superlink", f"flwr run . federation --run-config '{config}'")
        ends: list[float] = []
        while len(ends) <= ROUNDS:  # the final evaluation has a row, too
            wait_until(lambda: len(server.rows()) > len(ends), server.logs, timeout=1800)
            ends.append(time.time())
            if victims and len(ends) == KILL_IN - 1:
                time.sleep(SECONDS)
                victims.kill()
        rows = server.rows()
        messages = server.messages()

    for row, end in zip(rows, ends, strict=True):
        total = row["seconds"]["total"]
        used = load.between(end - total, end)
        cpu = ", ".join(f"{part} {seconds:.1f}" for part, seconds in used.items())
        lost = f"{row['valid']} of {row['asked']}"
        print(f"  {row['kind']} {row['round']}: {total:.1f} s, {lost}; CPU {cpu}", flush=True)
    for error in {message["error"] for message in messages if message["error"]}:
        print(f"  a stub answered: {error}")
    asked = [message["asked"] for message in messages if message["kind"] == "query"]
    trained = [message["asked"] for message in messages if message["kind"] == "train"]
    calm = rows[1 : KILL_IN - 1]  # rounds after the first in which nobody is killed
    seconds = statistics.mean(row["seconds"]["total"] for row in calm) - SECONDS
    used = load.between(ends[0], ends[len(calm)])
    return [
        str(sites),
        f"{min(trained) - min(asked):.1f} s",
        f"{seconds:.1f} s",
        f"{rows[KILL_IN - 1]['seconds']['total'] - SECONDS:.1f} s" if doomed else "–",
        *(f"{load.peak[part] / 1e6:,.0f} MB" for part in PARTS[:3]),
        *(f"{used[part] / len(calm):.1f} s" for part in PARTS),
    ]


HEADS = (
    "sites",
    "introductions",
    "a round",
    "a round, 30 % killed",
    *(f"{part}: memory" for part in PARTS[:3]),
    *(f"{part}: CPU a round" for part in PARTS),
)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("sites", nargs="*", type=int, default=[10, 50, 100, 300])
    parser.add_argument("--secagg", action="store_true", help="secure aggregation")
    parser.add_argument("--settings", default="", help="more settings of the run")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that all processes are ended
    table = []
    for sites in options.sites:
        print(f"{sites} sites …", flush=True)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            os.environ.update(environment(Path(folder) / "home"))
            table.append(measure(sites, options.secagg, Path(folder), options.settings))
        print(markdown(HEADS, table), flush=True)


if __name__ == "__main__":
    main()
