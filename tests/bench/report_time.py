"""How long a run's page takes to draw, as a process of its own, imports included: 20 clients × 100 rounds.

    python -m tests.bench.report_time [--clients 20 --rounds 100 --classes 100 --times 3]

The run is made up: random figures and prototypes in the files that a FedTGP run leaves. What the server spends in a
round on the margins is told too (D = 512).
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from protofl_common.maths.prototypes import Prototypes, margins
from tests.support.fakes import row, write, write_prototypes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        sites = [f"site-{index}" for index in range(options.clients)]
        folder = write(Path(place) / "run", [row(number, sites) for number in range(1, options.rounds + 1)])
        write_prototypes(folder, sites, [f"class {index}" for index in range(options.classes)], options.rounds)
        command = [sys.executable, "-c", "import sys; from protofl_common.tools.cli import main; sys.exit(main())"]
        for _ in range(options.times):
            start, worked = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
            subprocess.run([*command, "report", str(folder)], check=True, stdout=subprocess.DEVNULL)
            size = (folder / "report.html").stat().st_size
            seconds = time.perf_counter() - start
            worked = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - worked
            print(f"protofl report: {seconds:5.1f} s, of them {worked:.1f} s at work; {size / 1e6:.1f} MB", flush=True)
    sets = [Prototypes(torch.randn(options.classes, 512), torch.arange(options.classes)) for _ in sites]
    start = time.perf_counter()
    for one in sets:
        margins(one, options.classes)
    print(f"margins of a round: {1000 * (time.perf_counter() - start):.0f} ms")


if __name__ == "__main__":
    main()
