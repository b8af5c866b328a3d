"""Runs that differ in nothing but their seeds, as one group; and groups against each other, seed by seed.

The 95 % interval of n figures is mean ± t · s / √n, with Student's t of n − 1 degrees of freedom.
"""

import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scipy.special import stdtr, stdtrit

from protofl_common.basics.files import replacing
from protofl_common.config.datasets import is_own
from protofl_common.config.options import Config, SettingsError, keys_of
from protofl_common.config.python_names import module_of
from protofl_common.config.sections import DataSettings
from protofl_common.runs.figures import counted
from protofl_common.runs.folder import SUMMARY, RunFolder, reading
from protofl_common.tools.tables.figure import Figure, NoFigure
from protofl_common.tools.tables.plan import experiment

CONFIDENCE = 0.95
OF_ALL_RUNS = ("protofl", "python", "flwr", "torch", "numpy")  # what every run notes the version of
ESTIMATED = (
    "n",
    "mean",
    "95 % interval",
    "difference",
    "95 % interval",
    "p",
)  # heads of `estimated`


@dataclass(frozen=True)
class Estimate:
    n: int
    mean: float
    half: float  # half of the interval; NaN for one figure
    p: float  # of the t-test that the mean is 0; NaN for one figure

    @classmethod
    def of(cls, figures: Iterable[float]) -> "Estimate":
        values = list(figures)
        n, mean = len(values), statistics.fmean(values)
        if n == 1:
            return cls(n, mean, math.nan, math.nan)
        error = statistics.stdev(values) / math.sqrt(n)
        t = abs(mean) / error if error else math.inf if mean else 0.0
        return cls(
            n,
            mean,
            float(stdtrit(n - 1, (1 + CONFIDENCE) / 2)) * error,
            float(2 * stdtr(n - 1, -t)),
        )

    def interval(self, digits: int) -> str:
        return (
            f"{self.mean - self.half:.{digits}f} … {self.mean + self.half:.{digits}f}"
            if self.n > 1
            else "–"
        )

    def as_dict(self, test: bool = False) -> dict[str, object]:
        """For JSON, with p if this is a difference to ``test``; None where one figure tells nothing."""
        interval = [self.mean - self.half, self.mean + self.half] if self.n > 1 else None
        p = {"p": self.p if self.n > 1 else None} if test else {}
        return {"n": self.n, "mean": self.mean, "interval": interval, **p}


def estimated(figures: Iterable[float], than: Estimate | None, digits: int) -> list[str]:
    """Cells for the mean of ``figures`` and, if there is one, its difference from another."""
    estimate = Estimate.of(figures)
    cells = [str(estimate.n), f"{estimate.mean:.{digits}f}", estimate.interval(digits)]
    if than is None:
        return [*cells, "–", "–", "–"]
    p = "–" if than.n == 1 else "< 0.001" if than.p < 0.001 else f"{than.p:.3f}"
    return [*cells, f"{than.mean:+.{digits}f}", than.interval(digits), p]


def holm(values: Mapping[str, float]) -> dict[str, float]:
    """Correct p-values for their number, after Holm (1979); the smallest first."""
    largest, corrected = 0.0, {}
    for rank, name in enumerate(sorted(values, key=lambda name: values[name])):
        corrected[name] = largest = max(largest, min(1.0, (len(values) - rank) * values[name]))
    return corrected


def difference(more: Mapping[int, float], less: Mapping[int, float]) -> Estimate | None:
    """How much more the figures are, over the seeds that both have; None without any."""
    pairs = [value - less[seed] for seed, value in more.items() if seed in less]
    return Estimate.of(pairs) if pairs else None


@dataclass(frozen=True)
class Group:
    settings: Config
    clients: int
    runs: dict[int, Path]  # seed -> folder
    values: dict[int, float]  # seed -> figure
    figures: dict[int, str]  # seed -> which one
    name: str = ""
    digits: int = 2  # that it is shown with

    @property
    def figure(self) -> str:
        return " or ".join(dict.fromkeys(self.figures.values()))

    @property
    def data(self) -> Config:
        """The settings that the division of the data depends on, beside the seed."""
        keys = (
            *keys_of(DataSettings),
            "division",
            f"code of {module_of(str(self.settings.get('dataset')))}",
        )
        return {key: self.settings[key] for key in keys if key in self.settings} | {
            "clients": self.clients
        }

    def beyond(self, reference: "Group") -> tuple[Estimate | None, str]:
        """How much more its figure is, over the seeds that both have; why not, or which seeds are left out."""
        if self.data != reference.data:
            return None, "not paired: other data, or divided otherwise"
        if (than := difference(self.values, reference.values)) is None:
            return None, "not paired: no seed in common"
        left = len(self.values.keys() | reference.values.keys()) - than.n
        notes = [f"left out, without a partner: {left} of the seeds"] if left else []
        notes += ["one pair: may be chance"] if than.n == 1 else []
        notes += [f"by {self.figure}"] if self.figure != reference.figure else []
        notes += (
            ["other networks"]
            if self.settings["networks"] != reference.settings["networks"]
            else []
        )
        return than, "; ".join(notes)


def run_folders(given: Iterable[Path]) -> list[Path]:
    """The folders of runs among ``given``, and those of the finished runs in others."""
    folders: list[Path] = []
    for folder in given:
        inside = (
            []
            if (folder / SUMMARY).exists()
            else sorted(path.parent for path in folder.glob(f"*/{SUMMARY}"))
        )
        folders += inside or [folder]
    return list(dict.fromkeys(folders))


def grouped(folders: Sequence[Path], figure: Figure | None) -> list[Group]:
    """The groups in the order of their first runs, by ``figure``, or the head's accuracy, or else the prototypes'."""
    groups: dict[str, Group] = {}
    for folder in folders:
        try:
            with reading(f"{folder}: not the figures of a run"):
                summary = RunFolder(folder).finished_summary()
                settings, clients = experiment(summary["settings"]), len(summary["clients"])
                settings["division"] = summary.get("division", 1)
                settings["networks"] = counted(
                    client["arch"] for client in summary["clients"].values()
                )
                if is_own(str(settings.get("dataset"))) and (
                    place := summary["settings"].get("data-dir")
                ):
                    settings["data-dir"] = str(
                        Path(str(place)).absolute()
                    )  # other files are another experiment
                versions = summary.get(
                    "versions", {}
                ).items()  # edited code of one's own is another experiment
                settings |= {
                    f"code of {name}": version
                    for name, version in versions
                    if name not in OF_ALL_RUNS
                }
                seed = int(settings.pop("seed", 0))
                chosen = figure or Figure(
                    what="head" if summary["accuracy"].get("head") else "prototype"
                )
                empty = Group(settings, clients, {}, {}, {}, digits=chosen.digits)
                group = groups.setdefault(json.dumps([settings, clients], sort_keys=True), empty)
                if seed in group.runs and _ended(folder) < _ended(group.runs[seed]):
                    continue  # of equal runs the latest counts
                group.values[seed] = chosen.read(folder)
                group.runs[seed], group.figures[seed] = folder, chosen.described(folder)
        except NoFigure as error:
            raise SettingsError(f"{folder}: {error}; --what names another figure") from None
    return [replace(each, name=_name(each, groups.values())) for each in groups.values()]


def _ended(folder: Path) -> float:
    """When a run ended; of a run before that was recorded, the time of its file, which a copy may change."""
    return RunFolder(folder).finished_summary().get("ended", os.stat(folder / SUMMARY).st_mtime)


def _name(group: Group, groups: Iterable[Group]) -> str:
    differing = [
        f"{key}={value}"
        for key, value in group.settings.items()
        if key not in ("algo", "networks")
        and any(other.settings.get(key, value) != value for other in groups)
    ]
    rest = [(other.clients, {**other.settings, "networks": ""}) for other in groups]
    if (
        rest.count((group.clients, {**group.settings, "networks": ""})) > 1
    ):  # nothing else tells them apart
        differing.append(f"networks={group.settings['networks']}")
    clients = (
        [f"{group.clients} clients"]
        if any(other.clients != group.clients for other in groups)
        else []
    )
    return " ".join([str(group.settings.get("algo", "")), *differing, *clients])


def draw_groups(groups: Sequence[Group], unit: str, file: Path) -> None:
    """Draw the means with 95 % intervals, and a stroke for each run, as SVG or PDF."""
    from protofl_common.report.drawing import COLOURS, canvas, short

    with canvas(6.4, 1.1 + 0.4 * len(groups)) as (figure, axes):
        for row, group in enumerate(groups):
            estimate, colour = Estimate.of(group.values.values()), COLOURS[row % len(COLOURS)]
            axes.plot(
                list(group.values.values()), [row] * estimate.n, "|", color=colour, markersize=9
            )
            half = 0 if math.isnan(estimate.half) else estimate.half
            axes.errorbar(estimate.mean, row, xerr=half, fmt="o", color=colour, capsize=3)
        axes.set_yticks(
            range(len(groups)),
            [short(f"{each.name} (n = {len(each.values)})", 44) for each in groups],
        )
        axes.set_ylim(len(groups) - 0.5, -0.5)
        axes.set_xlabel(unit)
        kind = file.suffix[1:]
        with replacing(file) as beside:
            figure.savefig(
                beside, format=kind, metadata={"Date" if kind == "svg" else "CreationDate": None}
            )
