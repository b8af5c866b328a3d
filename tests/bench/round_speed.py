"""``make bench DATA_DIR=…``: a federated round against the same passes in bare PyTorch, on this machine, in one run.

    python -m tests.bench.round_speed --data-dir D [--htfllib FOLDER] [--parts rounds] [--samples 4000]

FedProto and FedTGP on Fashion-MNIST, HtCNN8, 20 clients, Dirichlet 0.1, batch 10, one epoch, D = 512; two Ray actors of
one thread against two bare processes of one thread (`bare.py`) and, given the folder of HtFLlib, against its own loop
(`htfllib.py`). FedTGP is as in HtFLlib's code, with 100 epochs of its server in all three. Prints ratios; nothing here
passes or fails.
"""

import argparse
import json
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from client_app.data import Samples
from client_app.evaluation import evaluate, features_of
from protofl_common.config.architectures import GROUPS
from protofl_common.experiment.settings import Settings, default_run_config
from protofl_common.maths.prototypes import Prototypes, class_means
from protofl_common.models.build import build_model
from protofl_common.runs.over_clients import human_bytes
from tests.bench import htfllib
from tests.bench.bare import BareFederation, plain_htcnn
from tests.support.processes import Connection, superlink

CLIENTS = 20
SETTING = {"dataset": "fashion-mnist", "partition": "dirichlet", "alpha": 0.1, "train-samples": 0, "models": "htcnn8",
    "feature-dim": 512, "batch-size": 10, "local-epochs": 1, "lr": 0.01, "momentum": 0.0}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "FedProto": {"algo": "fedproto"},
    "FedTGP": {"algo": "fedtgp", "fedtgp.distance": "mse", "fedtgp.granularity": "sample"}
    | {"fedtgp.lambda": 1.0, "fedtgp.margin": "nearest"},
}
"""Name -> what makes it the same work in all loops: the clients' term is the samples' mean square, of weight 1."""


def federated(connection: Connection, folder: Path, name: str, **changes: Any) -> list[dict[str, Any]]:
    """The rows of one `flwr run`."""
    config = SETTING | {"out-dir": str(folder), "run-name": name} | changes
    text = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
    options = f"num-supernodes={CLIENTS} client-resources-num-cpus=1"
    output, status = connection.run("--federation-config", options, "--run-config", text, timeout=3600)
    assert status == "finished:completed", output
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "round"]


def compare_rounds(connection: Connection, folder: Path, method: str, options: argparse.Namespace) -> None:
    """(a), (c) and (d): wall clock of a steady round, and what the engine adds to a client's round."""
    changes = METHODS[method] | {"data-dir": options.data_dir, "total-samples": options.samples}
    settings = Settings.from_run_config(default_run_config() | SETTING | changes)

    def ours(name: str) -> list[dict[str, Any]]:
        return federated(connection, folder, f"{method}-{name}", **changes, rounds=options.rounds + 1)[1:]

    bare = BareFederation(settings, CLIENTS)
    bare.round()  # without prototypes yet
    bare_seconds = [bare.round() for _ in range(options.rounds)]
    rows, theirs = ours("before"), []
    if options.htfllib:
        theirs = htfllib_rounds(folder / "htfllib", settings, options)
        rows += ours("after")
    bare_seconds += [bare.round() for _ in range(options.rounds)]
    bare.close()
    seconds = [row["seconds"]["total"] for row in rows]
    print(f"{method}\nbare round       {spread(bare_seconds)} s")
    print(f"federated round  {spread(seconds)} s")
    print(f"(a) ratio        {statistics.median(seconds) / statistics.median(bare_seconds):.3f}")
    print_phases(rows)
    if theirs:
        ratio = statistics.median(seconds) / statistics.median(theirs)
        print(f"(d) HtFLlib's own loop: {spread(theirs)} s a round; ours / HtFLlib's: {ratio:.3f}", flush=True)


def htfllib_rounds(folder: Path, settings: Settings, options: argparse.Namespace) -> list[float]:
    """Seconds of HtFLlib's rounds on our division."""
    if not folder.exists():
        htfllib.write_division(folder, settings, CLIENTS)
    return htfllib.seconds(options.htfllib, folder, settings, CLIENTS, options.rounds)


def print_phases(rows: list[dict[str, Any]]) -> None:
    """(c): what a client's round is made of."""
    phases: dict[str, float] = {}
    for row in rows:
        for phase, seconds in row["seconds"]["clients"].items():
            phases[phase] = phases.get(phase, 0) + seconds / len(rows)
    work = sum(phases[phase] for phase in ("train", "evaluate", "prototypes"))
    per_client = {phase: 1000 * seconds / CLIENTS for phase, seconds in phases.items()}
    total = statistics.mean(row["seconds"]["total"] for row in rows)
    rest = 1000 * (2 * total - sum(phases.values())) / CLIENTS
    print("(c) per client and round, ms: " + ", ".join(f"{phase} {ms:.0f}" for phase, ms in per_client.items()))
    print(f"    engine, wire and waiting for the last client {rest:.0f} ms; work {1000 * work / CLIENTS:.0f} ms")
    server = 1000 * statistics.mean(row["seconds"]["aggregate"] for row in rows)
    sizes = rows[-1]["bytes"]
    print(f"    server: {server:.1f} ms a round; {human_bytes(sizes['up'])} up, {human_bytes(sizes['down'])} down")


def compare_passes(repeats: int) -> None:
    """(b): evaluation and prototype passes against the bare forward passes of the same samples, one thread."""
    data = Samples(torch.randn(2500, 1, 28, 28), torch.randint(0, 10, (2500,)))
    known = Prototypes(torch.randn(10, 512), torch.arange(10))
    totals: dict[str, list[float]] = {
        "prototypes": [],
        "evaluate": [],
        "bare body": [],
        "bare body+head": [],
        "plain": [],
    }
    for _ in range(repeats):
        times = dict.fromkeys(totals, 0.0)
        for arch in GROUPS["htcnn8"]:
            model = build_model(arch, input_shape=(1, 28, 28), num_classes=10, feature_dim=512, seed=1).eval()
            body, head = plain_htcnn(arch, 512, 10)

            def forward(parts: list[torch.nn.Module], images: torch.Tensor = data.inputs) -> None:
                with torch.inference_mode():
                    for batch in images.split(500):
                        for part in parts:
                            batch = part(batch)

            works = {
                "bare body": lambda model=model: forward([model.body]),
                "prototypes": lambda model=model: class_means(features_of(model, data, 500), data.labels, 10),
                "bare body+head": lambda model=model: forward([model.body, model.head]),
                "evaluate": lambda model=model: evaluate(model, data, 500, known),
                "plain": lambda body=body, head=head: forward([body, head]),
            }
            for name, work in works.items():
                start = time.perf_counter()
                work()
                times[name] += time.perf_counter() - start
        for name, seconds in times.items():
            totals[name].append(seconds)
    middle = {name: statistics.median(seconds) for name, seconds in totals.items()}
    print(f"(b) prototype pass / bare forward   {middle['prototypes'] / middle['bare body']:.3f}")
    print(f"    evaluation pass / bare forward  {middle['evaluate'] / middle['bare body+head']:.3f}")
    print(f"    our forward / plain Sequential  {middle['bare body+head'] / middle['plain']:.3f}")


def watch_memory(connection: Connection, folder: Path, data_dir: str) -> None:
    """(e): memory of the client processes over 30 rounds of a smaller division of the same data."""
    samples: list[tuple[float, int]] = []
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(0.5):
            samples.append((time.time(), client_memory()))

    thread = threading.Thread(target=sample)
    thread.start()
    begin = time.time()
    rows = federated(connection, folder, "memory", **{"data-dir": data_dir, "rounds": 30, "total-samples": 7000})
    stop.set()
    thread.join()
    inside = [size for moment, size in samples if size and moment > begin]
    third = max(1, len(inside) // 3)
    print(f"(e) client processes, RSS together: peak {human_bytes(max(inside))} over {len(rows)} rounds")
    parts = [statistics.median(inside[start : start + third]) for start in (0, third, 2 * third)]
    print("    median of the first, second and last third: " + ", ".join(human_bytes(part) for part in parts))


def client_memory() -> int:
    """RSS of all of Ray's client actors, in bytes."""
    total = 0
    for process in psutil.process_iter(["cmdline", "memory_info"]):
        if process.info["memory_info"] and any("ClientAppActor" in part for part in process.info["cmdline"] or []):
            total += process.info["memory_info"].rss
    return total


def spread(seconds: list[float]) -> str:
    """``median (min … max)``."""
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f} … {max(seconds):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True, help="folder with FashionMNIST/raw")
    parser.add_argument("--htfllib", type=Path, help="folder of HtFLlib, whose own loop is measured too")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count, in each run")
    parser.add_argument("--samples", type=int, default=0, help="of the training data, to try this out; 0: all")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--parts", nargs="*", default=["passes", "rounds", "memory"])
    options = parser.parse_args()
    options.data_dir = str(Path(options.data_dir).resolve())
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "passes" in options.parts:
            compare_passes(repeats=5)
        with superlink(folder, "--simulation") as connection:
            for method in options.methods if "rounds" in options.parts else ():
                compare_rounds(connection, folder, method, options)
            if "memory" in options.parts:
                watch_memory(connection, folder, options.data_dir)


if __name__ == "__main__":
    main()
