"""The end of a run and its baselines: how they compare, and the page with the figures."""

from __future__ import annotations

from pathlib import Path

from protofl_common.experiment.settings import Settings
from protofl_common.runs.comparison import compared, sentence
from protofl_common.runs.folder import SITES
from server_app.callbacks.console import comparison_table
from server_app.log import say


def conclude(settings: Settings, folder: Path) -> None:
    """After the run and its baselines: how they compare, where the results are, and the page."""
    runs = compared(folder, settings.baselines)
    if len(runs) > 1:
        say(comparison_table(runs))
    if runs:
        say(f"result: {sentence(runs)}")
    say(f"results: {folder}")
    draw(settings, folder)


def draw(settings: Settings, folder: Path) -> None:
    """The page with the run's figures, if the settings want it; a failure to draw it is said and fails nothing."""
    if not settings.run.report or not (folder / SITES).exists():
        return
    from protofl_common.report.page import write_report  # takes seconds: when all else is done

    try:
        say(f"report: {write_report(folder)}")
    except Exception as error:
        say(f"report: not drawn, {type(error).__name__}: {error}")
