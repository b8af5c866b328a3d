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
        self.standing, self.times = Standing(folder, running), times
        self.site_program, self.worker_program = "flower-supernode", "flower-superexec"
        self.ports: dict[str, int] = {}  # Site -> the port of its relay, if it has one
        self.config: dict[str, Any] = {
            "rounds": times + 1,
            "run-name": "trial",
            "num-clients": 2,
            "join-timeout": 300,
        }
        self.run = folder / "runs" / "trial"

    def begin(self, sites: int = 2, **changes: Any) -> None:
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
        """The client process of the south in round ``number``, a moment after it began."""
        self.standing.wait_for_rounds("trial", number - 1)
        client = self.standing.wait_for_client("south")
        time.sleep(after)
        return client

    def was_submitted(self, times: int) -> bool:
        return len(self.standing.runs()) >= times

    def rows(self) -> list[dict[str, Any]]:
        return [row for row in self.standing.rows("trial") if row["kind"] == "round"]

    def prototypes(self) -> str:
        """A digest of the final global prototypes; "" without any."""
        if not (self.run / "prototypes.safetensors").exists():
            return ""
        arrays = load_file(self.run / "prototypes.safetensors")
        return hashlib.sha256(b"".join(arrays[key].tobytes() for key in sorted(arrays))).hexdigest()


def undisturbed(trial: Trial) -> Tries:
    trial.begin()
    return []


def killed(*parts: str) -> Callable[[Trial], Tries]:
    """These parts are killed and started again, from the second round on, in each a little later.

    It costs nothing.
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
    """All client processes of the south are stopped meanwhile, also those that it starts.

    Afterwards they go on.
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
    """In every other round, stopped until the round is over."""
    trial.begin(rounds=2 * trial.times + 1, round_timeout=DEADLINE, **changes)
    struck = range(2, 2 * trial.times + 1, 2)
    for number in struck:
        trial.standing.wait_for_rounds("trial", number - 1)
        with held(trial):
            trial.standing.wait_for_rounds("trial", number)
    return lost_replies(trial, struck, "missing")


def silent(trial: Trial) -> Tries:
    """Stopped for ever."""
    trial.begin(round_timeout=DEADLINE)
    struck = range(2, trial.times + 2)
    trial.standing.wait_for_rounds("trial", 1)
    with held(trial):
        return lost_replies(trial, struck, "missing", "failed")


def client_killed(trial: Trial) -> Tries:
    """In every other round, as the kernel does where memory is short.

    Flower starts it again after half a minute.
    """
    trial.begin(rounds=2 * trial.times + 1, round_timeout=DEADLINE)
    struck = range(2, 2 * trial.times + 1, 2)
    for number in struck:
        trial.training(number, after=2.0).kill()
        trial.standing.wait_for_rounds("trial", number)
    return lost_replies(trial, struck, "missing", "failed")


def worker_crashed(trial: Trial) -> Tries:
    """Killed and started again, as `protofl worker`; nobody resumes the run. It costs nothing."""
    trial.worker_program = f"protofl worker --out-dir {trial.standing.folder / 'runs'}"
    trial.begin()
    for number in range(2, trial.times + 2):
        trial.training(number, after=number)
        trial.standing.kill("worker")
        trial.worker()
        trial.standing.wait(partial(trial.was_submitted, number), pause=1)
    return exact(trial)


def frozen(trial: Trial) -> Tries:
    """In every other round, stopped until the round is over, each time a little later."""
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
    """In every other round, once the site's log has what is sent: 45 MB, for a second or more."""
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
    """By a slow line it is seen when a part of the reply is there. It costs nothing."""
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
    """For faults of one reply: what became of it is told, and the site's next reply counts."""
    tries = lost_replies(trial, struck, "missing", "failed")
    rows = {row["round"]: row for row in trial.rows()}
    for one, number in zip(tries, struck, strict=True):
        one["right"] = one["right"] and "south" in rows[number + 1]["clients"]
    return tries


def full_disk(trial: Trial) -> Tries:
    """A file system of 20 MB, filled up before the state is written. Needs root."""
    disk = trial.standing.folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(disk)], check=True)
    trial.standing.running.callback(subprocess.run, ["umount", "-l", str(disk)], check=True)
    trial.begin(sites=1)
    trial.site("south", disk)
    struck, kept = range(2, trial.times + 2), []
    for number in struck:
        trial.standing.wait_for_rounds("trial", number - 1)
        before = contents(disk)
        filler = disk / "filler"
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass
        trial.standing.wait_for_rounds("trial", number)
        filler.unlink(missing_ok=True)
        kept.append(
            max(before) in contents(disk) and contents(disk)[max(before)] == before[max(before)]
        )
    tries = lost_replies(trial, struck, "failed")
    return [one | {"state": not whole} for one, whole in zip(tries, kept, strict=True)]


def contents(disk: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in disk.rglob("*.safetensors")}


def late(trial: Trial) -> Tries:
    """One site begins alone; in each of the next rounds another is started."""
    trial.begin(sites=1, rounds=trial.times + 7, num_clients=1)
    guests = [f"guest-{index}" for index in range(trial.times)]
    for index, name in enumerate(guests):
        trial.standing.wait_for_rounds("trial", index + 1)
        trial.standing.start_site(name, index, trial.times)
    trial.standing.finished(timeout=900)
    first = {
        name: next((row for row in trial.rows() if name in row["clients"]), None) for name in guests
    }
    return [
        {
            "replies": sum(row["asked"] - row["valid"] for row in trial.rows()),
            "rounds": 0,
            "state": False,
            "right": row is not None and "prototype" in row["clients"][name]["accuracy"],
        }
        for name, row in first.items()
    ]


def lost_replies(trial: Trial, struck: range, *kinds: str) -> Tries:
    """For faults that may cost a reply.

    What became of it is told, and the round went on with the others.
    """
    trial.standing.finished(timeout=600)
    rows = {row["round"]: row for row in trial.rows()}
    return [
        {
            "replies": rows[number]["asked"] - rows[number]["valid"],
            "rounds": int(rows[number]["void"]),
            "state": False,
            "right": "north" in rows[number]["clients"]
            and any("south" in rows[number][kind] for kind in ("clients", *kinds)),
        }
        for number in struck
    ]


def exact(trial: Trial) -> Tries:
    """For faults that should cost nothing: the prototypes are those of the undisturbed run."""
    trial.standing.finished(timeout=600)
    lost = [row["asked"] - row["valid"] for row in trial.rows()]
    voids = [int(row["void"]) for row in trial.rows()]
    return [
        {"replies": lost[at], "rounds": voids[at], "state": None}
        for at in range(1, trial.times + 1)
    ]


DEADLINE = 45.0
"""Seconds that a round may take where a client is stopped.

They are several times what it takes on a free machine.
"""

PATIENCE = 300.0
"""Seconds that a round may take where the site itself has to find that a process is lost."""

FAULTS: dict[str, tuple[Callable[[Trial], Tries], str, str]] = {
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
    """A run with the fault; what came of it."""
    what, _, line = FAULTS[name]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="protofl-faults-") as folder, ExitStack() as running:
        trial = Trial(Path(folder), running, times)
        tries = what(trial)
        status = trial.standing.finished(timeout=600)
        said = (
            [found[0].strip() for found in re.finditer(line, trial.standing.printed())]
            if line
            else []
        )
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
    results = {
        key: json.loads((out / f"{key}.json").read_text())
        for key in FAULTS
        if (out / f"{key}.json").exists()
    }
    wanted = results.get("undisturbed", {}).get("prototypes")
    rows = []
    for name, result in results.items():
        if not (tries := result["tries"]):
            continue
        same = result["prototypes"] == wanted
        exactly = all(one["state"] is None for one in tries)
        right = same if exactly else all(one["right"] for one in tries)
        outcome = (
            ("the same prototypes, bit for bit" if exactly else "goes on") if right else "NOT RIGHT"
        )
        outcome = outcome if result["status"] == "finished:completed" else result["status"]
        state = (
            ("none" if same else "?") if exactly else (sum(one["state"] for one in tries) or "none")
        )
        lost = [sum(one[key] for one in tries) or "none" for key in ("replies", "rounds")]
        said = f"`{result['line']}`" if result["line"] else ""
        rows.append([FAULTS[name][1], str(len(tries)), outcome, *map(str, (*lost, state)), said])
    return (
        markdown(
            ("fault", "times", "outcome", "replies lost", "rounds lost", "state lost", "it says"),
            rows,
        )
        + "\n"
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, default=Path("faults"), help="folder of the results")
    parser.add_argument("--times", type=int, default=5, help="how often each fault strikes")
    parser.add_argument("--only", nargs="*", choices=FAULTS, default=list(FAULTS))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.only:
        if (kept := arguments.out / f"{name}.json").exists():
            continue
        print(f"{name} …", flush=True)
        result = try_fault(name, arguments.times)
        kept.write_text(json.dumps(result, indent=1))
        print(f"  {result['status']}, {result['seconds']:.0f} s", flush=True)
        (arguments.out / "table.md").write_text(table(arguments.out))
    print(table(arguments.out))


if __name__ == "__main__":
    main()
