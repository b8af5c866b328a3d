"""docs/algorithms/gaussian.md: one exchange beside trained heads, behind a backbone of ImageNet.

pip install 'protofl[backbones]'
protofl table configs/tables/one-round.yaml --data-dir /data    # what has to lie there stands in the table's note
python -m tests.bench.one_round /data                           # the page's table, of runs/tables/runs
"""

import argparse
import statistics
from pathlib import Path

from protofl_common.basics.text import human_bytes
from protofl_common.runs.folder import RunFolder, Summary
from protofl_common.tools.tables.plan import Cell, plan
from protofl_common.tools.tables.spec import read_table
from tests.bench.natural import TABLES, of_seeds

HEADS = ("", "rounds", "accuracy", "worse off than alone", "up and down", "seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data_dir")
    parser.add_argument("--out", type=Path, default=Path("runs/tables"), help="as of `protofl table`")
    arguments = parser.parse_args()
    table = read_table(TABLES / "one-round.yaml")
    cells = {(cell.column, cell.row): cell for cell in plan(table, data_dir=arguments.data_dir)}
    for column in table.columns:
        print(f"\n**{column}**\n\n| {' | '.join(HEADS)} |\n{'|---' * len(HEADS)}|")
        alone = finished(cells[column, "Local"], arguments.out / "runs")
        for row in table.rows:
            found = finished(cells[column, row], arguments.out / "runs")
            print(f"| {' | '.join((row, *figures(found, alone, cells[column, row].figure.what)))} |")


def finished(cell: Cell, runs: Path) -> list[Path]:
    return [runs / run.name for run in cell.runs.values() if run.finished(runs / run.name)]


def figures(runs: list[Path], alone: list[Path], what: str) -> list[str]:
    summaries = [RunFolder(run).finished_summary() for run in runs]
    if len(summaries) < 2:
        return ["–"] * (len(HEADS) - 1)
    pairs = [
        (mine[what], own["head"])
        for summary, local in zip(summaries, map(of_clients, alone), strict=True)
        for mine, own in zip(summary["accuracy-of-clients"].values(), local.values(), strict=True)
    ]
    seconds = [sum(row["seconds"]["total"] for row in RunFolder(run).rows()) for run in runs]
    return [
        str(summaries[0]["settings"]["rounds"]),
        of_seeds([100 * summary["accuracy"][what]["mean"] for summary in summaries], 1),
        "–" if runs == alone else f"{sum(mine < own for mine, own in pairs)} of {len(pairs)}",
        human_bytes(statistics.fmean(sum(summary["bytes"].values()) for summary in summaries)),
        f"{statistics.fmean(seconds):.0f}",
    ]


def of_clients(run: Path) -> dict[str, dict[str, float]]:
    clients: Summary = RunFolder(run).finished_summary()
    return dict(clients["accuracy-of-clients"])


if __name__ == "__main__":
    main()
