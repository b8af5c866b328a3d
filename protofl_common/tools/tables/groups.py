"""Runs that differ in nothing but their seeds, as one group; and groups compared seed by seed.

The 95 % interval of n figures is mean ± t · s / √n, with Student's t of n − 1 degrees of freedom.
"""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from scipy.special import stdtr, stdtrit

from protofl_common.basics.text import human_bytes
from protofl_common.config.datasets import is_own
from protofl_common.config.options import Config, SettingsError, keys_of
from protofl_common.config.python_names import module_of
from protofl_common.config.sections import DataSettings
from protofl_common.runs.figures import counted, lost_replies, results_of_folders
from protofl_common.runs.folder import SUMMARY, RunFolder, Summary, reading
from protofl_common.tools.tables.figure import Figure, NoFigure
from protofl_common.tools.tables.plan import experiment

if TYPE_CHECKING:
    from protofl_common.report.drawing import Drawing  # matplotlib, half a second

CONFIDENCE = 0.95
SIGNIFICANT = 0.05  # p below which a lead is shown as one
OF_ALL_RUNS = ("protofl", "python", "flwr", "torch", "numpy")  # Every run notes their versions
ESTIMATED = ("n", "mean", "95 % interval", "difference", "95 % interval", "p", "p (Holm)")
"""Heads of the cells of `estimate_rows`, behind those of the names."""
COSTS = ("rounds", "up", "down", "seconds", "seconds per round", "lost replies")
"""Heads of the cells of `cost_cells`."""
ABOUT_COSTS = (
    "Means over the runs: bytes of arrays that all clients together sent and received, the seconds "
    "of the whole run on the machine that made it, and how many replies could not be used."
)
ABOUT_P = (
    "p is of a two-sided paired t-test over the seeds; Holm's p is corrected for the number of "
    "comparisons in this table."
)


@dataclass(frozen=True)
class Estimate:
    """The mean of n figures, with its 95 % interval and a t-test that the true mean is 0."""

    n: int
    mean: float
    half_width: float  # Half of the interval; NaN for one figure
    p: float  # Of the t-test that the mean is 0; NaN for one figure

    @classmethod
    def of(cls, figures: Iterable[float]) -> "Estimate":
        """Estimate the mean of these figures by Student's t; there must be at least one."""
        values = list(figures)
        n = len(values)
        mean = statistics.fmean(values)
        if n == 1:
            return cls(n, mean, math.nan, math.nan)

        error = statistics.stdev(values) / math.sqrt(n)  # the standard error of the mean
        t = math.inf if mean else 0.0  # if all figures are the same, and the error 0
        if error:
            t = abs(mean) / error
        degrees = n - 1
        # the interval has two ends, and the test two sides: 2.5 % lie beyond each end
        quantile = float(stdtrit(degrees, (1 + CONFIDENCE) / 2))
        p = float(2 * stdtr(degrees, -t))
        return cls(n, mean, half_width=quantile * error, p=p)

    @property
    def ends(self) -> list[float] | None:
        """The lower and the upper end of the interval; None for one figure."""
        if self.n == 1:
            return None
        return [self.mean - self.half_width, self.mean + self.half_width]

    def interval(self, digits: int) -> str:
        """Return the 95 % interval as text with so many decimals; "–" for one figure."""
        if self.ends is None:
            return "–"
        return " … ".join(f"{end:.{digits}f}" for end in self.ends)

    def as_dict(self, test: bool = False) -> dict[str, object]:
        """Return the estimate for JSON, and with ``test`` also p, as for a difference.

        Of one figure the interval and p are None.
        """
        content: dict[str, object] = {"n": self.n, "mean": self.mean, "interval": self.ends}
        if test:
            content["p"] = self.p if self.ends else None
        return content


class Estimated(NamedTuple):
    """What a row of a table of estimates is about."""

    names: list[str]  # of its first cells
    figures: Iterable[float]
    digits: int  # decimals that are shown
    gain: Estimate | None  # how much more they are than another row's; None: nothing is compared


def estimate_rows(entries: Sequence[Estimated]) -> list[list[str]]:
    """Return the cells of a table's rows: the names, and behind them those of `ESTIMATED`.

    The p-values of all gains are corrected together. A "–" stands where nothing is compared.
    """
    p_values = {number: entry.gain.p for number, entry in enumerate(entries) if entry.gain}
    corrected = holm(p_values)
    rows = []
    for number, (names, figures, digits, gain) in enumerate(entries):
        estimate = Estimate.of(figures)
        count = str(estimate.n)
        difference = ["–", "–", "–", "–"]
        if gain:
            p_cells = [_p_cell(gain.p), _p_cell(corrected.get(number, math.nan))]
            difference = [f"{gain.mean:+.{digits}f}", gain.interval(digits), *p_cells]
            if gain.n < estimate.n:
                count += f" ({gain.n} paired)"
        mean = f"{estimate.mean:.{digits}f}"
        rows.append([*names, count, mean, estimate.interval(digits), *difference])
    return rows


def _p_cell(p: float) -> str:
    if math.isnan(p):
        return "–"
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def cost_cells(folders: Iterable[Path]) -> list[str]:
    """Return the cells of `COSTS` for finished runs: each is the mean over the runs.

    SettingsError for a run whose summary is malformed.
    """
    costs = []  # of each run
    for folder in folders:
        run = RunFolder(folder).finished_summary()
        with reading(f"{folder}: not the figures of a run"):
            lost = sum(lost_replies(run).values())
            sizes = [run["bytes"]["up"], run["bytes"]["down"]]
            numbers = [run["rounds"], *sizes, run["seconds"], run["seconds-per-round"], lost]
            costs.append([float(number) for number in numbers])
    rounds, up, down, *seconds, replies = map(statistics.fmean, zip(*costs, strict=True))
    texts_of_seconds = [f"{number:.1f}" for number in seconds]
    return [f"{rounds:g}", human_bytes(up), human_bytes(down), *texts_of_seconds, f"{replies:g}"]


Name = TypeVar("Name")


def holm(p_values: Mapping[Name, float]) -> dict[Name, float]:
    """Correct the p-values of several tests for their number (Holm 1979); the smallest comes first.

    The k-th smallest of n, counted from 0, is multiplied by n − k, and is at most 1. A value of NaN
    is left out and does not count: a comparison of a single pair is no test.
    """
    tests = {name: p for name, p in p_values.items() if not math.isnan(p)}
    corrected = {}
    largest = 0.0  # so far: a larger p may not become smaller than one before it
    for rank, name in enumerate(sorted(tests, key=lambda name: tests[name])):
        largest = max(largest, min(1.0, (len(tests) - rank) * tests[name]))
        corrected[name] = largest
    return corrected


def difference(figures: Mapping[int, float], reference: Mapping[int, float]) -> Estimate | None:
    """Estimate ``figures`` minus ``reference``, both by seed, over the seeds that both have.

    Return None if they have no seed in common.
    """
    differences = []
    for seed, figure in figures.items():
        if seed in reference:
            differences.append(figure - reference[seed])
    return Estimate.of(differences) if differences else None


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seeds only."""

    settings: Config
    clients: int
    runs: dict[int, Path]  # Seed -> folder
    ended: dict[int, float]  # Seed -> when, in seconds since 1970
    values: dict[int, float]  # Seed -> figure
    figures: dict[int, str]  # Seed -> which figure that is
    name: str = ""
    digits: int = 2  # That the figure is shown with
    what: str = "head"  # The figure's accuracy, metric or count

    @property
    def figure(self) -> str:
        return " or ".join(dict.fromkeys(self.figures.values()))

    @property
    def data(self) -> Config:
        """All that the division of the data depends on, but for the seed.

        That is settings about data, the version of the dividing code, the user's own data and the
        version of the code that makes them, and the number of clients.
        """
        code = f"code of {module_of(str(self.settings.get('dataset')))}"
        keys = (*keys_of(DataSettings), "division", "data", code)
        settings = {key: self.settings[key] for key in keys if key in self.settings}
        return {**settings, "clients": self.clients}

    def difference_from(self, reference: "Group") -> tuple[Estimate | None, str]:
        """Estimate by how much this group's figure is above that of the ``reference``.

        Only seeds that both groups have are compared. Return the estimate, and a note for people.
        The estimate is None, and the note says why, if the groups cannot be compared; it is None
        for the ``reference`` itself, too. Otherwise the note says what limits the comparison; "" if
        nothing does.
        """
        if self is reference:
            return None, ""
        if self.data != reference.data:
            return None, "not paired: other data, or divided otherwise"
        gain = difference(self.values, reference.values)
        if gain is None:
            return None, "not paired: no seed in common"

        notes = []
        if gain.n == 1:
            notes.append("one pair: may be chance")
        if self.figure != reference.figure:
            notes.append(f"by {self.figure}")
        if self.settings["networks"] != reference.settings["networks"]:
            notes.append("other networks")
        return gain, "; ".join(notes)


def run_folders(paths: Iterable[Path]) -> list[Path]:
    """Replace each folder of runs among ``paths`` by the finished runs in it; return each run once.

    The folder of a single run stays. So does one without finished runs: whoever reads it will say
    what is wrong.
    """
    folders: list[Path] = []
    for folder in paths:
        is_finished_run = (folder / SUMMARY).exists()
        inside = sorted(path.parent for path in folder.glob(f"*/{SUMMARY}"))
        if inside and not is_finished_run:
            folders += inside
        else:
            folders.append(folder)
    return list(dict.fromkeys(folders))


def grouped(folders: Sequence[Path], figure: Figure | None) -> list[Group]:
    """Group finished runs whose settings differ in nothing but the seed, and read their figures.

    The groups are in the order of their first runs. Without a ``figure`` it is the result of each
    run (`results_of_folders`). Of several runs with the same settings and seed the latest counts.
    SettingsError for a run that has no such figure, or is not finished or malformed.
    """
    figures = dict.fromkeys(folders, figure or Figure())
    if figure is None:
        for folder, result in results_of_folders(folders).items():
            figures[folder] = Figure(what=result.name)
    groups: dict[str, Group] = {}  # by what their runs have in common
    for folder in folders:
        try:
            with reading(f"{folder}: not the figures of a run"):
                _add_run(groups, folder, figures[folder])
        except NoFigure as error:
            raise SettingsError(f"{folder}: {error}; --what names another figure") from None

    names = [_name(group, groups.values()) for group in groups.values()]
    named = []
    for group, name in zip(groups.values(), names, strict=True):
        if names.count(name) > 1:  # networks are named only where nothing else tells groups apart
            name += f" networks={group.settings['networks']}"
        named.append(replace(group, name=name))
    return named


def _add_run(groups: dict[str, Group], folder: Path, figure: Figure) -> None:
    """Add a run to its group in ``groups``, and make the group if it is the first.

    Nothing is changed if the group has a later run of the same seed.
    """
    summary = RunFolder(folder).finished_summary()
    settings = _experiment_of(summary)
    seed = int(settings.pop("seed", 0))
    clients = len(summary["clients"])

    key = json.dumps([settings, clients], sort_keys=True)  # what the runs of a group have in common
    empty = Group(settings, clients, {}, {}, {}, {}, digits=figure.digits, what=figure.what)
    group = groups.setdefault(key, empty)
    ended = summary.get("ended", 0.0)
    if ended < group.ended.get(seed, 0.0):
        return
    group.values[seed], group.figures[seed] = figure.measured(folder)
    group.runs[seed] = folder
    group.ended[seed] = ended


def _experiment_of(summary: Summary) -> Config:
    """Return what tells experiments apart: runs are of one group if all but the seed is equal.

    That is settings, the version of the dividing code, the clients' networks, the user's own data
    and their place, and the version of the user's own code.
    """
    settings = experiment(summary["settings"])
    settings["division"] = summary["division"]
    settings["networks"] = counted(client["arch"] for client in summary["clients"].values())
    if "data" in summary:
        settings["data"] = summary["data"]
    folder = summary["settings"].get("data-dir")
    if folder and is_own(str(settings.get("dataset"))):  # with other files it is another experiment
        settings["data-dir"] = str(Path(str(folder)).absolute())
    for name, version in summary["versions"].items():
        if name not in OF_ALL_RUNS:  # a package of the user's: edited, it is another experiment
            settings[f"code of {name}"] = version
    return settings


def _name(group: Group, groups: Iterable[Group]) -> str:
    """Name a group by its algorithm, and by all settings in which it differs from another group."""
    others = list(groups)
    parts = [str(group.settings.get("algo", ""))]
    for key, value in group.settings.items():
        differs = any(other.settings.get(key, value) != value for other in others)
        if differs and key not in ("algo", "networks"):
            parts.append(f"{key}={value}")
    if any(other.clients != group.clients for other in others):
        parts.append(f"{group.clients} clients")
    return " ".join(parts)


def intervals(groups: Sequence[Group], unit: str) -> "Drawing":
    """Draw a line for each group: its mean with the 95 % interval, and a stroke for each run.

    ``unit`` is the label of the axis.
    """
    from protofl_common.report.drawing import INK, Drawing, canvas, short

    height = 1.1 + 0.4 * len(groups)  # inches: 1.1 for the axis, 0.4 for each group
    with canvas(6.4, height) as (figure, axes):
        for row, group in enumerate(groups):
            estimate = Estimate.of(group.values.values())
            axes.plot([*group.values.values()], [row] * estimate.n, "|", color=INK, markersize=9)
            half = 0 if math.isnan(estimate.half_width) else estimate.half_width  # NaN of one run
            axes.errorbar(estimate.mean, row, xerr=half, fmt="o", color=INK, capsize=3)
        names = [short(f"{group.name} (n = {len(group.values)})", 44) for group in groups]
        axes.set_yticks(range(len(groups)), names)
        axes.set_ylim(len(groups) - 0.5, -0.5)  # the first group is on top
        axes.set_xlabel(unit)
        return Drawing(figure, "intervals", "Means", "Means with 95 % intervals.")
