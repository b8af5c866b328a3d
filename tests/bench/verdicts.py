"""docs/papers.md and the list of exploration: what papers claim against what was measured.

    python -m tests.bench.verdicts

It reads docs/papers/claims.yaml, docs/papers/measured.csv and the papers' numbers in
configs/tables, and writes the two lists anew, each between its markers. The rule stands in
docs/papers.md.
"""

import csv
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, ConfigDict, TypeAdapter
from scipy.special import stdtrit

from protofl_common.config.options import key_of
from protofl_common.runs.figures import Table
from protofl_common.tools.tables.groups import CONFIDENCE
from protofl_common.tools.tables.spec import read_table
from tests.bench.printing import with_content

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TABLES = ROOT / "configs" / "tables"
CLAIMS = DOCS / "papers" / "claims.yaml"
MEASURED = DOCS / "papers" / "measured.csv"
VERDICTS = DOCS / "papers.md"
EXPLORATION = DOCS / "notebook" / "2026-11-papers.md"
BEGIN, END = "<!-- written by make verdicts -->\n", "<!-- end -->\n"

SEEDS_OF_AN_INTERVAL = 3

Cell = tuple[str, str]
"""A row and a column of a table."""


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


@dataclass(frozen=True)
class Claim:
    """What a paper says, as claims.yaml has it; its head explains the fields."""

    __pydantic_config__ = ConfigDict(extra="forbid", alias_generator=key_of)

    item: str
    table: str = ""
    columns: list[str] = field(default_factory=lambda: [""])
    paper_column: str = ""
    best: str = ""
    rows: list[str] = field(default_factory=list)
    numbers: str = ""
    effect: float = 0.0
    plus: list[str | Cell] = field(default_factory=list)
    less: list[str | Cell] = field(default_factory=list)
    paper: Annotated[list[float], BeforeValidator(_as_list)] = field(default_factory=list)
    not_run: list[Literal["data", "feature", "hours"]] = field(default_factory=list)
    instead: str = ""
    note: str = ""


@dataclass(frozen=True)
class Paper:
    page: str
    claims: list[Claim]
    note: str = ""


@dataclass(frozen=True)
class Sample:
    """What was measured of a cell: values by seed, or their mean, deviation and number."""

    values: Mapping[int, float]
    mean: float
    deviation: float  # NaN for one seed
    seeds: int

    @property
    def is_counted(self) -> bool:
        """Return whether no draw is in it, as in numbers of parameters."""
        return self.seeds == 1 and self.deviation == 0


@dataclass(frozen=True)
class Interval:
    """A mean, or a difference of means, with its 95 % interval.

    ``half_width`` is infinite where too few seeds give none, 0 where nothing is drawn.
    """

    mean: float
    half_width: float
    seeds: int

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width

    def __str__(self) -> str:
        if math.isinf(self.half_width):
            return f"{_text(self.mean)}, {self.seeds} seed{'s' * (self.seeds > 1)}"
        if not self.half_width:
            return _text(self.mean)
        return f"{_text(self.mean)} ({_text(self.low)} … {_text(self.high)})"


def _text(number: float) -> str:
    return f"{round(number, 2):g}".replace("-", "−")


@dataclass(frozen=True)
class Line:
    """A line of the list."""

    paper: str
    ours: str
    verdict: str
    item: str = ""


Measured = Mapping[str, Mapping[Cell, Sample]]
"""Table -> cell -> what was measured."""


def read_claims(path: Path = CLAIMS) -> dict[str, Paper]:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    return TypeAdapter(dict[str, Paper]).validate_python(content)


def read_measured(path: Path = MEASURED) -> Measured:
    """Read seeds, which stand in a line each, and means, which bring deviation and number."""
    tables: dict[str, dict[Cell, Sample]] = {}
    with path.open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            cells = tables.setdefault(line["table"], {})
            cell = (line["row"], line["column"])
            value = float(line["value"])
            if not line["seed"]:
                deviation, seeds = float(line["deviation"]), int(line["seeds"])
                cells[cell] = Sample({}, value, deviation, seeds)
                continue
            values = {int(line["seed"]): value}
            if cell in cells:
                values = {**cells[cell].values, **values}
            cells[cell] = _of_seeds(values)
    return tables


def _of_seeds(values: Mapping[int, float]) -> Sample:
    deviation = statistics.stdev(values.values()) if len(values) > 1 else math.nan
    return Sample(values, statistics.fmean(values.values()), deviation, len(values))


def interval_of(plus: Sequence[Sample], less: Sequence[Sample] = ()) -> Interval:
    """Return the sum of ``plus`` less that of ``less``.

    It is paired over the seeds that all of them have. Where seeds were not kept, the samples count
    as independent, with Welch's degrees of freedom.
    """
    samples = [*plus, *less]
    signs = [1] * len(plus) + [-1] * len(less)
    common = set.intersection(*(set(sample.values) for sample in samples))
    if common:
        sums = {}
        for seed in common:
            values = [sample.values[seed] for sample in samples]
            sums[seed] = sum(sign * value for sign, value in zip(signs, values, strict=True))
        samples, signs = [_of_seeds(sums)], [1]

    mean = sum(sign * sample.mean for sign, sample in zip(signs, samples, strict=True))
    seeds = min(sample.seeds for sample in samples)
    drawn = [sample for sample in samples if not sample.is_counted]
    if not drawn:
        return Interval(mean, 0.0, seeds)
    if min(sample.seeds for sample in drawn) < SEEDS_OF_AN_INTERVAL:
        return Interval(mean, math.inf, seeds)
    variances = [sample.deviation**2 / sample.seeds for sample in drawn]
    variance = sum(variances)
    if not variance:
        return Interval(mean, 0.0, seeds)
    parts = 0.0
    for each, sample in zip(variances, drawn, strict=True):
        parts += each**2 / (sample.seeds - 1)
    quantile = float(stdtrit(variance**2 / parts, (1 + CONFIDENCE) / 2))
    return Interval(mean, quantile * math.sqrt(variance), seeds)


def verdict_on_difference(ours: Interval, claimed: float | None) -> str:
    """Apply the rule of docs/papers.md to a difference: yes, in direction, no or undecided.

    ``claimed``: the paper's difference; None if it tells only that there is one, above 0.
    """
    reach = abs(claimed) / 2 if claimed is not None else 0.0
    if claimed is not None and claimed - reach <= ours.low and ours.high <= claimed + reach:
        return "yes"
    sign = 1 if claimed is None or claimed > 0 else -1
    if min(sign * ours.low, sign * ours.high) > 0:
        return "in direction"
    if max(sign * ours.low, sign * ours.high) < 0:
        return "no"
    return "undecided"


def verdict_on_number(ours: Interval, paper: float, effect: float) -> str:
    """Apply the rule to a number: yes within half of the ``effect`` that the paper reports."""
    low, high = paper - effect / 2, paper + effect / 2
    if low <= ours.low and ours.high <= high:
        return "yes"
    if ours.high < low or high < ours.low:
        return "no"
    return "undecided"


def papers_numbers(table: str, column: str) -> dict[str, float]:
    """Return the paper's number of each row of a table's column, without its deviation."""
    path = TABLES / f"{table}.yaml"
    numbers = {}
    if path.exists():
        for name, row in read_table(path).rows.items():
            text = row.paper.get(column, "").split(" ")[0]
            if text and text != "–":
                numbers[name] = float(text)
    return numbers


def lines_of(claim: Claim, measured: Measured) -> Iterator[Line]:
    """Yield what there is to say of a claim: a line for each of its columns."""
    if claim.not_run:
        reasons = " and ".join(claim.not_run)
        yield Line("–", claim.note or "–", f"not run: {reasons}", claim.item)
        return
    cells = measured[claim.table]
    for number, column in enumerate(claim.columns):
        of_paper = papers_numbers(claim.table, claim.paper_column or column)
        given = claim.paper[number] if claim.paper else None
        if claim.best:
            line = best(claim, column, of_paper, cells)
        elif claim.numbers:
            if given is not None:
                of_paper = {claim.numbers: given}
            line = numbers(claim, column, of_paper, cells)
        else:
            line = difference(claim, column, cells, given)
        item = claim.item
        if len(claim.columns) > 1:
            item += f" ({column})"
        ours = line.ours
        if claim.note and not number:
            ours += f"; {claim.note}"
        yield replace(line, item=item, ours=ours)


def best(
    claim: Claim, column: str, of_paper: Mapping[str, float], cells: Mapping[Cell, Sample]
) -> Line:
    """Judge the lead of ``claim.best`` over the best other row, in the paper and in our cells."""
    others = [row for row in claim.rows or of_paper if row != claim.best]
    found = {row: cells[row, column] for row in others if (row, column) in cells}
    missing = [row for row in others if row not in found]
    own = cells[claim.best, column]
    strongest = max(found, key=lambda row: found[row].mean)
    rank = 1 + sum(sample.mean > own.mean for sample in found.values())
    ours = interval_of([own], [found[strongest]])
    lead = None
    if of_paper.keys() >= {claim.best, *others}:
        lead = of_paper[claim.best] - max(of_paper[row] for row in others)

    verdict = verdict_on_difference(ours, lead)
    text = f"rank {rank} of {1 + len(found)}; lead over {strongest}: {ours}"
    if missing:
        text += f"; not measured: {', '.join(missing)}"
        if verdict != "no":
            verdict = "undecided"
    return Line("ahead" if lead is None else f"ahead by {_text(lead)}", text, verdict)


def numbers(
    claim: Claim, column: str, of_paper: Mapping[str, float], cells: Mapping[Cell, Sample]
) -> Line:
    """Judge each number of the paper that has one of ours beside it."""
    effect = claim.effect
    if not effect:
        others = [value for row, value in of_paper.items() if row != claim.numbers]
        effect = abs(of_paper[claim.numbers] - max(others))
    verdicts: dict[str, list[str]] = {"yes": [], "no": [], "undecided": [], "not run": []}
    for row, paper in of_paper.items():
        verdict = "not run"
        if (row, column) in cells:
            verdict = verdict_on_number(interval_of([cells[row, column]]), paper, effect)
        verdicts[verdict].append(row)
    named = [f"{verdict}: {' · '.join(rows)}" for verdict, rows in verdicts.items() if rows]
    counts = [f"{len(rows)} {verdict}" for verdict, rows in verdicts.items() if rows]
    return Line(f"effect {_text(effect)}", "; ".join(named), ", ".join(counts))


def difference(
    claim: Claim, column: str, cells: Mapping[Cell, Sample], given: float | None
) -> Line:
    """Judge a difference, of which the paper gives the size or only the sign."""
    plus = [_cell(cell, column) for cell in claim.plus]
    less = [_cell(cell, column) for cell in claim.less]
    ours = interval_of([cells[cell] for cell in plus], [cells[cell] for cell in less])
    claimed = given if given is not None else _papers_difference(claim, plus, less)
    if claimed is None:
        return Line("more than 0", str(ours), verdict_on_difference(ours, None))
    if claim.effect:
        verdict = verdict_on_number(ours, claimed, claim.effect)
        return Line(f"{_text(claimed)}, effect {_text(claim.effect)}", str(ours), verdict)
    return Line(_text(claimed), str(ours), verdict_on_difference(ours, claimed))


def _cell(cell: str | Cell, column: str) -> Cell:
    return (cell, column) if isinstance(cell, str) else (cell[0], cell[1])


def _papers_difference(claim: Claim, plus: Sequence[Cell], less: Sequence[Cell]) -> float | None:
    """Return the paper's own difference of these cells; None where it lacks one of them."""
    total = 0.0
    for sign, cells in ((1, plus), (-1, less)):
        for row, column in cells:
            of_paper = papers_numbers(claim.table, claim.paper_column or column)
            if row not in of_paper:
                return None
            total += sign * of_paper[row]
    return total


def written(exploration: bool) -> str:
    """Return one of the two lists: of the papers' own data and tests, or of others."""
    measured = read_measured()
    parts = []
    for name, paper in read_claims().items():
        rows = []
        for claim in paper.claims:
            if bool(claim.instead) != exploration:
                continue
            for line in lines_of(claim, measured):
                item = f"{line.item} [{claim.instead}]" if exploration else line.item
                verdict = line.verdict if exploration else f"**{line.verdict}**"
                rows.append((item, line.paper, line.ours, verdict))
        if not rows:
            continue
        page = f"../{paper.page}" if exploration else paper.page
        part = f"### {name}\n\n[The method's page]({page}). {paper.note}".rstrip()
        heads = ("claim", "the paper", "ours", "by the rule" if exploration else "verdict")
        table = "\n".join(Table(heads, rows, words=range(len(heads))).as_markdown())
        parts.append(f"{part}\n\n{table}\n")
    return "\n".join(parts)


def with_list(page: Path, exploration: bool) -> str:
    """Return the page as it is to be."""
    text = page.read_text(encoding="utf-8")
    return with_content(text, BEGIN, f"\n{written(exploration)}", END)


def main() -> None:
    for page, exploration in ((VERDICTS, False), (EXPLORATION, True)):
        page.write_text(with_list(page, exploration), encoding="utf-8")


if __name__ == "__main__":
    main()
