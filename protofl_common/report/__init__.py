"""The page that a run leaves behind: ``report.html``, one file with everything in it.

`reading.py` reads the run's folder, a module of `figures/` draws each figure, `page.py` puts them together. Nothing
here is needed by a run: the server calls `write_report` when all else is done, ``protofl report RUN`` at any time.
matplotlib and scikit-learn are imported only then, for they take seconds.
"""

from __future__ import annotations

from pathlib import Path

from protofl_common.files import write_text

NAME = "report.html"


def write_report(folder: Path) -> Path:
    """Draw the page of the run in ``folder``, finished or not; its path.

    Raises
    ------
    SettingsError
        When the folder holds no run.
    OSError
        When the page cannot be written.
    """
    from protofl_common.report.page import page
    from protofl_common.report.reading import read_run

    path = folder / NAME
    write_text(path, page(read_run(folder)))
    return path
