"""``make bench-deployment``: a round's time where SuperLink and SuperNodes are processes.

The federation of docker/README.md on this machine: SuperLink, worker, door, two sites with 300
small images each. The lines of the SuperNodes' logs are stamped as they appear; a client's own work
is what it reports itself. ``--stock`` leaves out what we do about the waiting, ``--start-method
spawn`` what we do about the imports. Prints figures; nothing here passes or fails.
"""

import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path

import psutil

from tests.bench.printing import parser_of
from tests.support.machines import SITES, Machines

LINES = {
    "received": re.compile(r"Receiving: train message"),
    "started": re.compile(r"Start `flwr-clientapp` process"),
    "sending": re.compile(r"Sending: train message"),
    "sent": re.compile(r"Sent successfully"),
}
PARTS = {
    "asking": "until the SuperNode has the round's message",
    "starting": "until a process is there for it, with Flower imported",
    "around": "imports that are left, unpacking, packing, until the SuperNode has the reply",
    "work": "the client's own work",
    "sending": "until the reply is sent",
}
IMPORTS = {
    "Python": "",
    "Flower's client": "import flwr.supernode.cli.flwr_clientapp",
    "PyTorch": "import torch",
    "client_app": "import client_app.app",
    "torch._dynamo": "import torch._dynamo",
}
"""In the order in which a process needs them; each is timed after those before it."""


class Timed(Machines):
    """The README's federation; ``stock``: as it would be without our settings."""

    stock = False
    start_method = "fork"

    def _substitutions(self, machine: str) -> dict[str, str]:
        less = {"POLL_INTERVAL=0.1": "POLL_INTERVAL=1", "protofl site run": "flower-supernode"}
        method = {"protofl site run": f"protofl site run --start-method {self.start_method}"}
        return super()._substitutions(machine) | (less if self.stock else method)

    def environment(self, machine: str) -> dict[str, str]:
        """Return the environment with all of Flower's log."""
        return {**super().environment(machine), "FLWR_LOG_LEVEL": "INFO"}

    def processor_of_sites(self) -> float:
        """Return the CPU seconds of all that the sites have started.

        It still runs, or has ended and was waited for by its parent.
        """
        places = {str(self.checkout(site)) for site in SITES}
        total = 0.0
        for one in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                whole = one.parent() if one.status() == psutil.STATUS_ZOMBIE else one
                total += sum(one.cpu_times()[:4]) if whole and whole.cwd() in places else 0
        return total


class Stamps(threading.Thread):
    """Follows a log, and notes when each of the `LINES` appears in it."""

    def __init__(self, log: Path) -> None:
        super().__init__(daemon=True)
        self.log = log
        self.events: list[tuple[str, float]] = []

    def run(self) -> None:
        """Follow the log and note when each of LINES appears in it."""
        with self.log.open(encoding="utf-8", errors="replace") as lines:
            while True:
                while line := lines.readline():
                    for name, sign in LINES.items():
                        if sign.search(line):
                            self.events.append((name, time.monotonic()))
                time.sleep(0.01)


def parts_of_rounds(events: list[tuple[str, float]], work: list[float]) -> list[dict[str, float]]:
    """Return the seconds of each of the `PARTS` in each round.

    ``work``: what the client has reported for each round.
    """
    rounds: list[dict[str, float]] = []
    times: dict[str, float] = {}
    for name, moment in events:  # introduction and final evaluation are sent as well
        if name == "received":
            times = {"before": times.get("sent", moment)}
        times[name] = moment
        if name == "sent" and "sending" in times:
            rounds.append(times)
            times = {"sent": moment}
    parts = []
    for moments, own in zip(rounds, work, strict=True):
        parts.append({
            "asking": moments["received"] - moments["before"],
            "starting": moments["started"] - moments["received"],
            "around": moments["sending"] - moments["started"] - own,
            "work": own,
            "sending": moments["sent"] - moments["sending"],
        })  # fmt: skip
    return parts


def measure(rounds: int, folder: Path) -> None:
    """Make a run, and print the seconds of its rounds; the first round is left out."""
    with ExitStack() as running:
        machines = Timed(folder, running)
        machines.set_up()
        stamps = {site: Stamps(folder / f"{site}-0.log") for site in SITES}
        for stamp in stamps.values():
            stamp.start()
        config = (
            f'algo="fedproto" rounds={rounds} threads=1'
            ' dataset="domain-folder" partition="own" image-size=28'
            ' local-epochs=1 num-clients=2 run-name="bench"'
        )
        time.sleep(20)  # until the sites have imported what they import ahead
        before = machines.processor_of_sites()
        done = machines.run(
            "superlink", f"flwr run . federation --stream --run-config '{config}'", timeout=3600
        )
        metrics = machines.checkout("superlink") / "runs" / "bench" / "metrics.jsonl"
        if not metrics.exists():
            sys.exit(done.stdout + done.stderr + machines.logs())
        messages = rounds + 2  # introduction and final evaluation as well
        processor = (machines.processor_of_sites() - before) / messages / len(SITES)
        rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if row["kind"] == "round"]
    seconds = [row["seconds"]["total"] for row in rows[1:]]
    mean = statistics.mean(seconds)
    print(f"\nseconds per round: {mean:.2f} ({min(seconds):.2f} … {max(seconds):.2f})")
    print(f"CPU seconds of a site per message, its SuperNode's included: {processor:.2f}")
    collected: dict[str, list[float]] = defaultdict(list)
    for site, stamp in stamps.items():
        work = [sum(row["clients"][site]["seconds"].values()) for row in rows]
        for parts in parts_of_rounds(stamp.events, work)[1:]:
            for name, value in parts.items():
                collected[name].append(value)
    for name, meaning in PARTS.items():
        print(f"  {statistics.mean(collected[name]):6.2f}  {meaning}")
    phases = [row["seconds"]["clients"] for row in rows[1:]]
    of_work = []
    for name in phases[0]:
        mean_of_site = statistics.mean(phase[name] for phase in phases) / len(SITES)
        of_work.append(f"{name} {mean_of_site:.2f}")
    print("  of the work:", ", ".join(of_work))


def time_imports() -> None:
    """Print what each process pays before it can work: CPU seconds, the least of three."""
    steps = [f"{line}\nprint(time.process_time())" for line in IMPORTS.values()]
    command = [sys.executable, "-c", "\n".join(["import time", *steps])]
    laps = []
    for _ in range(3):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        moments = [0.0, *map(float, done.stdout.split())]
        laps.append([after - before for before, after in pairwise(moments)])
    print("CPU seconds of a process's imports:")
    for name, *each in zip(IMPORTS, *laps, strict=True):
        print(f"  {min(each):6.2f}  {name}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--stock", action="store_true", help="Flower's own polling")
    parser.add_argument("--start-method", choices=("fork", "spawn"), default="fork")
    options = parser.parse_args()
    Timed.stock, Timed.start_method = options.stock, options.start_method
    time_imports()
    with tempfile.TemporaryDirectory() as folder:
        measure(options.rounds, Path(folder))


if __name__ == "__main__":
    main()
