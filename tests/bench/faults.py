"""`make faults`: every fault that a federation should survive, on real Flower processes.

    python -m tests.bench.faults --out faults --times 5

Every fault is tried several times. It has a run of its own, in which it strikes once per round (or
every other), on a SuperLink, its worker and two SuperNodes. What came of it is kept in
``<out>/<fault>.json``, so that the command, started again, does only what is missing;
``<out>/table.md`` is made of all that is there.
"""

import hashlib
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from safetensors.numpy import load_file

from tests.bench.printing import markdown, parser_of
from tests.support.processes import free_port, repeated
from tests.support.relay import Relay
from tests.support.standing import Standing

SITES = ("north", "south")
Tries = list[dict[str, Any]]
"""For each time: replies lost, rounds lost, and whether private state was lost."""


class Trial:
    """One run of a federation, and the strokes that it gets."""

    def __init__(self, folder: Path, running: ExitStack, times: int) -> None:
        self.standing = Standing(folder, running)
        self.times = times
        self.site_program = "flower-supernode"
        self.worker_program = "flower-superexec"
        self.ports: dict[str, int] = {}  # Site -> the port of its relay, if it has one
        self.config: dict[str, Any] = {
            "rounds": times + 1,
            "run-name": "trial",
            "num-clients": 2,
            "join-timeout": 300,
        }
        self.run = folder / "runs" / "trial"

    def begin(self, sites: int = 2, **changes: Any) -> None:
        """Start a SuperLink, its worker and the sites, and submit a run with these changes."""
        self.config |= {key.replace("_", "-"): value for key, value in changes.items()}
        self.standing.start_superlink()
        self.worker()
        for site in SITES[:sites]:
            self.site(site)
        self.standing.submit(self.config)

    def worker(self) -> None:
        self.standing.start_worker(self.worker_program)

    def site(self, site: str, state: Path | None = None) -> None:
        place = (SITES.index(site), len(SITES), state, self.site_program)
        self.standing.start_site(site, *place, self.ports.get(site, 0))

    def training(self, number: int, after: float = 1.0) -> Any:
        """Wait for the south's client process in round ``number``, and ``after`` seconds more.

        Return the process.
        """
        self.standing.wait_for_rounds("trial", number - 1)
        client = self.standing.wait_for_client("south")
        time.sleep(after)
        return client

    def was_submitted(self, times: int) -> bool:
        return len(self.standing.runs()) >= times

    def rows(self) -> list[dict[str, Any]]:
        return [row for row in self.standing.rows("trial") if row["kind"] == "round"]

    def prototypes(self) -> str:
        """Return a digest of the final global prototypes; "" without any."""
        file = self.run / "prototypes.safetensors"
        if not file.exists():
            return ""
        arrays = load_file(file)
        content = b"".join(arrays[key].tobytes() for key in sorted(arrays))
        return hashlib.sha256(content).hexdigest()


def undisturbed(trial: Trial) -> Tries:
    trial.begin()
    return []


def killed(*parts: str) -> Callable[[Trial], Tries]:
    """Return a fault that kills these parts in every round from the second, and starts them again.

    They are killed a little later in each round. It costs nothing.
    """

    def fault(trial: Trial) -> Tries:
        starts = {
            "superlink": trial.standing.start_superlink,
            "worker": trial.worker,
        }
        starts |= {site: partial(trial.site, site) for site in SITES}
        trial.begin()
        for number in range(2, trial.times + 2):
            trial.training(number, after=2 * number - 3 if "worker" in parts else number)
            for part in parts:
                trial.standing.kill(part)
            time.sleep(2 if parts == ("superlink",) else 0)
            for part in parts:
                starts[part]()
            if "worker" in parts:
                trial.standing.submit(trial.config | {"resume": True})
        return exact(trial)

    return fault


@contextmanager
def held(trial: Trial) -> Iterator[None]:
    """Stop all client processes of the south, also those that it starts meanwhile.

    After the block they go on.
    """
    caught: dict[int, psutil.Process] = {}

    def hold() -> None:
        for client in trial.standing.family("south", "flwr-clientapp"):
            with suppress(psutil.NoSuchProcess):
                client.suspend()
            caught[client.pid] = client

    try:
        with repeated(hold, seconds=0.1):
            yield
    finally:
        for client in caught.values():
            with suppress(psutil.NoSuchProcess):
                client.resume()


def slow(trial: Trial, **changes: Any) -> Tries:
    """In every other round the south's client is stopped until the round is over."""
    trial.begin(rounds=2 * trial.times + 1, round_timeout=DEADLINE, **changes)
    struck = range(2, 2 * trial.times + 1, 2)
    for number in struck:
        trial.standing.wait_for_rounds("trial", number - 1)
        with held(trial):
            trial.standing.wait_for_rounds("trial", number)
    return lost_replies(trial, struck, "missing")


def silent(trial: Trial) -> Tries:
    """From the second round on the south's client is stopped for ever."""
    trial.begin(round_timeout=DEADLINE)
    struck = range(2, trial.times + 2)
    trial.standing.wait_for_rounds("trial", 1)
    with held(trial):
        return lost_replies(trial, struck, "missing", "failed")


def client_killed(trial: Trial) -> Tries:
    """In every other round the south's client is killed, as by the kernel where memory is short.

    Flower starts it again after half a minute.
    """
    trial.begin(rounds=2 * trial.times + 1, round_timeout=DEADLINE)
    struck = range(2, 2 * trial.times + 1, 2)
    for number in struck:
        trial.training(number, after=2.0).kill()
        trial.standing.wait_for_rounds("trial", number)
    return lost_replies(trial, struck, "missing", "failed")


def worker_crashed(trial: Trial) -> Tries:
    """The worker, `protofl worker`, is killed and started again, and nobody resumes the run.

    It costs nothing.
    """
    trial.worker_program = f"protofl worker --out-dir {trial.standing.folder / 'runs'}"
    trial.begin()
    for number in range(2, trial.times + 2):
        trial.training(number, after=number)
        trial.standing.kill("worker")
        trial.worker()
        trial.standing.wait(partial(trial.was_submitted, number), pause=1)
    return exact(trial)


def frozen(trial: Trial) -> Tries:
    """In every other round the south's client is stopped at its start, until the round is over.

    It is stopped a little later each time.
    """
    trial.site_program = "protofl site run"
    trial.begin(rounds=2 * trial.times + 1, round_timeout=PATIENCE)
    struck = range(2, 2 * trial.times + 1, 2)
    for number in struck:
        client = trial.training(number, after=0.05 * number - 0.1)
        with suppress(psutil.NoSuchProcess):
            client.suspend()
        trial.standing.wait_for_rounds("trial", number, timeout=2 * PATIENCE)
        with suppress(psutil.NoSuchProcess):
            client.resume()
    return back_in_the_next(trial, struck)


def killed_while_it_uploads(trial: Trial) -> Tries:
    """In every other round the client is killed once the site's log says what it sends.

    That are 45 MB, which take a second or more.
    """
    trial.site_program = "protofl site run"
    large = {"algo": "fedavg", "models": "resnet18"}
    trial.begin(rounds=2 * trial.times + 1, round_timeout=PATIENCE, **large)
    struck = range(2, 2 * trial.times + 1, 2)
    for number in struck:
        trial.standing.wait_for_upload("trial", "south", number)
        for client in trial.standing.clients("south"):
            with suppress(psutil.NoSuchProcess):
                client.kill()
        trial.standing.wait_for_rounds("trial", number, timeout=2 * PATIENCE)
    return back_in_the_next(trial, struck)


def superlink_killed_in_mid_push(trial: Trial) -> Tries:
    """The SuperLink is killed when it has a part of a reply, and started again. It costs nothing.

    A relay makes the line of the south slow, and tells how much has passed.
    """
    trial.site_program = "protofl site run"
    trial.ports["south"] = free_port()
    relay = Relay(trial.standing.port, trial.ports["south"])
    trial.standing.running.enter_context(relay)
    trial.begin()
    trial.standing.wait_for_rounds("trial", 1)
    relay.rate = 4000
    for number in range(2, trial.times + 2):
        trial.standing.wait_for_upload("trial", "south", number)
        trial.standing.wait(partial(relay.has_sent, relay.bytes_up + 6000), pause=0.02)
        trial.standing.kill("superlink")
        time.sleep(2)
        trial.standing.start_superlink()
    return exact(trial)


def back_in_the_next(trial: Trial, struck: range) -> Tries:
    """Return the tries of a fault of one reply.

    It is right if the run tells what became of the reply, and the site's next one counts.
    """
    tries = lost_replies(trial, struck, "missing", "failed")
    rows = {row["round"]: row for row in trial.rows()}
    for one, number in zip(tries, struck, strict=True):
        one["right"] = one["right"] and "south" in rows[number + 1]["clients"]
    return tries


def full_disk(trial: Trial) -> Tries:
    """The south's state is on a file system of 20 MB, filled up before it is written. Needs root.

    A try is right if the state of the round before is still there, whole.
    """
    disk = trial.standing.folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(disk)], check=True)
    trial.standing.running.callback(subprocess.run, ["umount", "-l", str(disk)], check=True)
    trial.begin(sites=1)
    trial.site("south", disk)
    struck = range(2, trial.times + 2)
    kept = []
    for number in struck:
        trial.standing.wait_for_rounds("trial", number - 1)
        before = contents(disk)
        filler = disk / "filler"
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass
        trial.standing.wait_for_rounds("trial", number)
        filler.unlink(missing_ok=True)
        newest = max(before)
        kept.append(contents(disk).get(newest) == before[newest])
    tries = lost_replies(trial, struck, "failed")
    return [one | {"state": not whole} for one, whole in zip(tries, kept, strict=True)]


def contents(disk: Path) -> dict[str, bytes]:
    """Return the content of each state, by its file's name, which begins with the round."""
    return {path.name: path.read_bytes() for path in disk.rglob("*.safetensors")}


def late(trial: Trial) -> Tries:
    """One site begins alone; in each of the next rounds another is started."""
    trial.begin(sites=1, rounds=trial.times + 7, num_clients=1)
    guests = [f"guest-{index}" for index in range(trial.times)]
    for index, name in enumerate(guests):
        trial.standing.wait_for_rounds("trial", index + 1)
        trial.standing.start_site(name, index, trial.times)
    trial.standing.wait_for_end(timeout=900)
    rows = trial.rows()
    lost = sum(row["asked"] - row["valid"] for row in rows)
    tries = []
    for name in guests:
        first = next((row for row in rows if name in row["clients"]), None)
        # it has received prototypes before its first reply
        is_right = first is not None and "prototype" in first["clients"][name]["accuracy"]
        tries.append({"replies": lost, "rounds": 0, "state": False, "right": is_right})
    return tries


def lost_replies(trial: Trial, struck: range, *kinds: str) -> Tries:
    """Return the tries of a fault that may cost a reply, in the rounds in which it ``struck``.

    It is right if the north's reply counts, and the south's does or is told as one of ``kinds``.
    """
    trial.standing.wait_for_end(timeout=600)
    rows = {row["round"]: row for row in trial.rows()}
    tries = []
    for number in struck:
        row = rows[number]
        is_told = any("south" in row[kind] for kind in ("clients", *kinds))
        tries.append({
            "replies": row["asked"] - row["valid"],
            "rounds": int(row["void"]),
            "state": False,
            "right": "north" in row["clients"] and is_told,
        })  # fmt: skip
    return tries


def exact(trial: Trial) -> Tries:
    """Return the tries of a fault that should cost nothing.

    The state is None: `table` compares the prototypes with those of the undisturbed run.
    """
    trial.standing.wait_for_end(timeout=600)
    tries = []
    rows = trial.rows()
    for number in range(2, trial.times + 2):  # the rounds in which it struck
        row = rows[number - 1]
        lost = row["asked"] - row["valid"]
        tries.append({"replies": lost, "rounds": int(row["void"]), "state": None})
    return tries


DEADLINE = 45.0
"""Seconds that a round may take where a client is stopped.

They are several times what it takes on a free machine.
"""

PATIENCE = 300.0
"""Seconds that a round may take where the site itself has to find that a process is lost."""

Fault = tuple[Callable[[Trial], Tries], str, str]
"""What it does, in words, and a pattern of the line in which the run tells of it ("": none)."""
FAULTS: dict[str, Fault] = {
    "undisturbed": (undisturbed, "", ""),
    "supernode": (killed("south"), "SuperNode killed in mid-round, started again", r"back: .*"),
    "superlink": (
        killed("superlink"),
        "SuperLink killed in mid-round, started again",
        r"the SuperLink did not .*",
    ),
    "server": (
        killed("worker"),
        "worker and ServerApp killed in mid-round, `resume=true`",
        r"resuming .*",
    ),
    "everything": (
        killed("superlink", "worker", *SITES),
        *("all processes killed in mid-round, started again, `resume=true`", r"resuming .*"),
    ),
    "client": (client_killed, "client process killed in mid-round", r"(failed|missing): south.*"),
    "slow": (slow, "client slower than `round-timeout`", r"late: .*"),
    "silent": (silent, "client that never answers", r"missing: .*"),
    "too-few": (partial(slow, min_replies=2), "fewer replies than `min-replies`", r"void: .*"),
    "frozen": (
        frozen,
        "client process frozen for 100 s at its start",
        r"(failed|missing): south.*",
    ),
    "upload": (
        killed_while_it_uploads,
        "client process killed while it uploads",
        r"(failed|missing): south.*",
    ),
    "crash": (worker_crashed, "worker crashes, and nobody resumes", r"resuming .*"),
    "mid-push": (
        superlink_killed_in_mid_push,
        "SuperLink killed in mid-push, started again",
        r"the SuperLink did not .*",
    ),
    "late": (late, "client that joins late", r"new: .*"),
    "full-disk": (full_disk, "disk of a client full", r"failed: .*"),
}


def try_fault(name: str, times: int) -> dict[str, Any]:
    """Make a run with the fault; return what came of it."""
    what, _, line = FAULTS[name]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="protofl-faults-") as folder, ExitStack() as running:
        trial = Trial(Path(folder), running, times)
        tries = what(trial)
        status = trial.standing.wait_for_end(timeout=600)
        said = []
        if line:
            printed = trial.standing.printed()
            said = [found[0].strip() for found in re.finditer(line, printed)]
        return {
            "tries": tries,
            "status": status,
            "prototypes": trial.prototypes(),
            "line": said[0] if said else "",
            "lines": len(said),
            "rows": trial.rows(),
            "seconds": time.monotonic() - began,
        }


def table(out: Path) -> str:
    """Return the table of all results in this folder, a row for each fault."""
    results = {}
    for name in FAULTS:
        file = out / f"{name}.json"
        if file.exists():
            results[name] = json.loads(file.read_text())
    wanted = results.get("undisturbed", {}).get("prototypes")

    rows = []
    for name, result in results.items():
        tries = result["tries"]
        if not tries:
            continue
        costs_nothing = all(one["state"] is None for one in tries)
        if costs_nothing:
            is_right = result["prototypes"] == wanted
            outcome = "the same prototypes, bit for bit"
            state: int | str = "none" if is_right else "?"
        else:
            is_right = all(one["right"] for one in tries)
            outcome = "goes on"
            state = sum(one["state"] for one in tries) or "none"
        if not is_right:
            outcome = "NOT RIGHT"
        if result["status"] != "finished:completed":
            outcome = result["status"]
        lost = [sum(one[key] for one in tries) or "none" for key in ("replies", "rounds")]
        said = f"`{result['line']}`" if result["line"] else ""
        rows.append([FAULTS[name][1], str(len(tries)), outcome, *map(str, (*lost, state)), said])

    heads = ("fault", "times", "outcome", "replies lost", "rounds lost", "state lost", "it says")
    return markdown(heads, rows) + "\n"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, default=Path("faults"), help="folder of the results")
    parser.add_argument("--times", type=int, default=5, help="how often each fault strikes")
    parser.add_argument("--only", nargs="*", choices=FAULTS, default=list(FAULTS))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.only:
        kept = arguments.out / f"{name}.json"
        if kept.exists():
            continue
        print(f"{name} …", flush=True)
        result = try_fault(name, arguments.times)
        kept.write_text(json.dumps(result, indent=1))
        print(f"  {result['status']}, {result['seconds']:.0f} s", flush=True)
        (arguments.out / "table.md").write_text(table(arguments.out))
    print(table(arguments.out))


if __name__ == "__main__":
    main()
