"""which.svg and docs/notebook/2026-11-which.md: every algorithm in four situations.

    python -m tests.bench.which measure --data-dir /data
    python -m tests.bench.which draw

They show accuracy, bytes and CPU seconds. ``measure`` runs the tables which*.yaml, run by run in
this process. It goes on where it was stopped; several may run at the same time. CPU seconds are
those of a whole run, clients and server, on one thread; a first run of the same data, whose seconds
do not count, fills the caches. ``draw`` makes the figure and the page's table from what was
measured.
"""

import csv
import fcntl
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from protofl_common.basics.text import human_bytes
from protofl_common.experiment.settings import default_run_config
from protofl_common.tools.tables.plan import Run, plan
from protofl_common.tools.tables.spec import read_table
from tests.bench.printing import markdown, of_seeds, parser_of, with_content
from tests.support.harness import run_federation

HERE = Path(__file__).parents[2]
TABLES = sorted((HERE / "configs" / "tables").glob("which*.yaml"))
MEASURED = HERE / "docs" / "algorithms" / "which.csv"
SEEDS = 3
COLUMNS = ("situation", "algorithm", "seed", "head", "prototype", "early", "up", "down", "seconds")
EARLY = 10
"""After so many rounds of the same runs: ``early``, the bracketed accuracy in the page's table."""
GROUPS = {
    "nothing": ("Local",),
    "whole models": (
        "FedAvg",
        "FedProx",
        "FedFA",
        "FeSEM",
        "FedNH",
        "FedProto + averaging",
        "FedPLVM",
        "FPL",
        "ProtoFed",
        "Per-FedAvg",
        "Ditto",
        "pFedMe",
        "FML",
        "FedKD",
    ),
    "a part of the model": ("FedPer", "FedRep", "LG-FedAvg", "FedGen", "MPFT", "FedGH"),
    "class vectors alone": ("FedProto", "FedTGP", "FedORGP", "FedSA", "FedDistill", "FedPCL"),
}
"""By what travels."""
COLOURS = ("#1f2430", "#c2571a", "#7a55b5", "#12805c")
SITUATIONS = ("label shift", "feature shift", "different architectures", "few samples")
PAGE = MEASURED.parents[1] / "notebook" / "2026-11-which.md"
BEGIN, END = "<!-- measured -->\n", "<!-- end -->\n"


@dataclass(frozen=True)
class Point:
    """An algorithm in a situation.

    Accuracies are in percent, one per seed; CPU seconds are in those of Local.
    """

    accuracies: list[float]
    early: list[float]  # after `EARLY` rounds; empty where a run has fewer
    bytes: float
    cost: float

    @property
    def accuracy(self) -> float:
        return statistics.fmean(self.accuracies)

    def __str__(self) -> str:
        early = f" ({statistics.fmean(self.early):.1f})" if self.early else ""
        few = f", n = {len(self.accuracies)}" if len(self.accuracies) < SEEDS else ""
        return of_seeds(self.accuracies) + early + few


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=("measure", "draw"))
    parser.add_argument("--data-dir", default="data")
    parser.add_argument(
        "--situation", choices=SITUATIONS, action="append", help="this one only; may be repeated"
    )
    parser.add_argument(
        "--part", type=int, nargs=2, default=[0, 1], metavar=("I", "N"), help="the I-th of N parts"
    )
    arguments = parser.parse_args()
    if arguments.what == "draw":
        points = {situation: found for situation in SITUATIONS if (found := points_of(situation))}
        draw(points)
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(with_content(page, BEGIN, table(points), END), encoding="utf-8")
    else:
        for seed in range(1, SEEDS + 1):
            measure(arguments.data_dir, seed, arguments.situation or SITUATIONS, *arguments.part)


def measure(data_dir: str, seed: int, situations: Sequence[str], part: int, parts: int) -> None:
    """Run every ``parts``-th cell of these situations, from ``part`` on, that is not yet done."""
    cells = [
        cell for file in TABLES for cell in plan(read_table(file), data_dir=data_dir, seeds=(seed,))
    ]
    for column in situations:
        done = {(row["situation"], row["algorithm"], row["seed"]) for row in measured()}
        chosen = [cell for cell in cells if cell.column == column][part::parts]
        todo = [cell for cell in chosen if (column, cell.row, str(seed)) not in done]
        for cell in todo[:1]:  # fills the caches; its seconds do not count
            run(cell.runs[seed], rounds=1)
        for cell in todo:
            write([column, cell.row, seed, *run(cell.runs[seed])])


def run(run: Run, **changed: int) -> list[str]:
    """Make a run; return the cells of its line behind the seed, as `COLUMNS` names them.

    They are accuracies in percent by head, by prototypes, and after `EARLY` rounds ("" for none),
    bytes up and down, and CPU seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        here = {"out-dir": folder, "report": False, "device": "cpu", "threads": 1}
        began = time.process_time()
        config = default_run_config() | run.config | here | changed
        outcome = run_federation(config, int(run.federation["num-supernodes"]))
        seconds = time.process_time() - began

    final = percent(outcome.summary["accuracy"])
    sent = outcome.summary["bytes"]
    head = final.get("head", "")
    prototype = final.get("prototype", "")
    early = ""
    for row in outcome.rows:
        if row["evaluated-after-round"] == EARLY:
            early = percent(row["accuracy"]).get("head" if head else "prototype", "")
            break
    return [head, prototype, early, sent["up"], sent["down"], f"{seconds:.2f}"]


def percent(accuracy: dict[str, dict[str, float]]) -> dict[str, str]:
    return {kind: f"{100 * figures['mean']:.2f}" for kind, figures in accuracy.items()}


def measured() -> list[dict[str, str]]:
    if not MEASURED.exists():
        return []
    with MEASURED.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write(values: list[object]) -> None:
    """Append a line to the file, which other processes may be writing too."""
    with MEASURED.open("a", encoding="utf-8", newline="") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        writer = csv.writer(file, lineterminator="\n")
        if file.tell() == 0:
            writer.writerow(COLUMNS)
        writer.writerow(values)


def points_of(situation: str) -> dict[str, Point]:
    """Return what was measured of each algorithm in a situation."""
    rows = [row for row in measured() if row["situation"] == situation]
    alone = {row["seed"]: float(row["seconds"]) for row in rows if row["algorithm"] == "Local"}
    found = {}
    for name in dict.fromkeys(row["algorithm"] for row in rows):
        own = [row for row in rows if row["algorithm"] == name and row["seed"] in alone]
        if not own:
            continue
        found[name] = Point(
            [float(row["head"] or row["prototype"]) for row in own],
            [float(row["early"]) for row in own if row["early"]],
            statistics.fmean(int(row["up"]) + int(row["down"]) for row in own),
            statistics.fmean(float(row["seconds"]) / alone[row["seed"]] for row in own),
        )
    return found


def table(points: dict[str, dict[str, Point]]) -> str:
    """Return the table: an algorithm a row, in the figure's groups; a situation's best is bold."""
    with_bytes = [situation for situation in ("label shift", "few samples") if situation in points]
    best = {}
    for situation, found in points.items():
        best[situation] = max(found.values(), key=lambda point: point.accuracy)

    rows = []
    for name in (name for group in GROUPS.values() for name in group):
        here = {situation: found[name] for situation, found in points.items() if name in found}
        if not here:
            continue
        row = [name]
        for situation in points:
            text = str(here.get(situation, "–"))
            row.append(f"**{text}**" if here.get(situation) is best[situation] else text)
        for situation in with_bytes:
            row.append(human_bytes(here[situation].bytes) if situation in here else "–")
        row.append(f"{statistics.fmean(point.cost for point in here.values()):.1f}")
        rows.append(row)

    bytes_heads = [f"bytes, {situation}" for situation in with_bytes]
    return markdown(("", *points, *bytes_heads, "CPU, × Local's"), rows) + "\n"


def draw(points: dict[str, dict[str, Point]]) -> None:
    """Draw which.svg: a column for each situation, accuracy over bytes above, over time below."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "which", "font.size": 9}
    from matplotlib import pyplot
    from matplotlib.ticker import NullFormatter

    figure, axes = pyplot.subplots(
        2,
        len(points),
        figsize=(1 + 3.3 * len(points), 7),
        sharey="col",
        layout="constrained",
        squeeze=False,
    )
    for (situation, found), (above, below) in zip(points.items(), axes.T, strict=True):
        for names, colour, group in zip(GROUPS.values(), COLOURS, GROUPS, strict=True):
            here = [found[name] for name in names if name in found]
            heights = [point.accuracy for point in here]
            above.scatter(
                [max(point.bytes, 1e4) for point in here], heights, 24, colour, label=group
            )
            below.scatter([point.cost for point in here], heights, 24, colour)
        for axis, across in ((above, "bytes"), (below, "cost")):
            axis.set_xscale("log")
            axis.xaxis.set_minor_formatter(NullFormatter())
            axis.spines[["top", "right"]].set_visible(False)
            axis.margins(0.15, 0.08)
            names = sorted(named(found), key=lambda name: found[name].accuracy)
            for name in names:
                least = 1e4 if across == "bytes" else 0  # the left edge, for those without bytes
                where = (max(getattr(found[name], across), least), found[name].accuracy)
                is_above = name == names[-1] or name in GROUPS["class vectors alone"]
                apart = (0, 5 if is_above else -12)
                axis.annotate(
                    name, where, apart, textcoords="offset points", ha="center", fontsize=8
                )
        above.set_title(situation)
        above.set_xlabel("bytes up + down (nothing: left edge)")
        above.xaxis.set_major_formatter(lambda value, _: human_bytes(value).replace(".0", ""))
        below.set_xlabel("CPU time, × Local's")
        below.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    for axis in axes[:, 0]:
        axis.set_ylabel("accuracy, %")
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=4,
        title="what travels",
    )
    figure.savefig(MEASURED.with_suffix(".svg"), metadata={"Date": None})


def named(found: dict[str, Point]) -> list[str]:
    """Return which algorithms have their names in the figure: FedAvg, and each group's best."""
    groups = [[name for name in group if name in found] for group in GROUPS.values()]
    best = [max(names, key=lambda name: found[name].accuracy) for names in groups if names]
    return list(dict.fromkeys([*best, *({"FedAvg"} & found.keys())]))


if __name__ == "__main__":
    main()
