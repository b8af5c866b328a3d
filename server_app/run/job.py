"""What Flower asks the server to do, as plain values, checked before any site is asked."""

import time
from dataclasses import dataclass, replace
from pathlib import Path

from protofl_common.basics.text import as_file_name
from protofl_common.config.options import Scalar, SettingsError, Values
from protofl_common.data import check_data_settings
from protofl_common.experiment.node import allow_named, code_at_server
from protofl_common.experiment.settings import Settings, baselines_of, to_run_config
from protofl_common.experiment.study import Study, is_past
from protofl_common.runs.folder import SUMMARY, RunFolder, baseline_folder
from server_app.run.checkpoint import check_free, check_same


@dataclass(frozen=True)
class Job:
    """A run, or a baseline of a run: its settings, and where its results go."""

    settings: Settings
    main_folder: Path
    """The run's folder; that of a baseline lies beside it."""
    run_id: int  # Flower's
    baseline: str = ""  # The algorithm, where this is a baseline
    runs_later: int = 0  # How many baselines follow

    @property
    def folder(self) -> Path:
        if not self.baseline:
            return self.main_folder
        return baseline_folder(self.main_folder, self.baseline)

    @property
    def config(self) -> dict[str, Scalar]:
        """The settings by their keys, as checkpoints and the summary store them."""
        return to_run_config(self.settings)

    @property
    def code(self) -> str:
        """The version of the code that computes at the server."""
        return code_at_server(self.settings.given)

    def is_complete(self) -> bool:
        """True if this job is resumed and was finished before.

        Raises CannotResume if it was finished with other settings.
        """
        if not self.settings.run.resume or not (self.folder / SUMMARY).exists():
            return False
        check_same(RunFolder(self.folder).finished_summary()["settings"], self.config, self.folder)
        return True


def open_jobs(run_config: Values, run_id: int) -> list[Job]:
    """Return the run that Flower was asked for, and then its baselines.

    Raises SettingsError or DataError where a setting is wrong, the study is over, or a folder holds
    another run. Python modules that the settings name may be imported from then on.
    """
    allow_named(run_config)  # whoever submits a run may name modules to import
    settings = Settings.from_run_config(run_config)
    until = Study.of(run_config).until
    if is_past(until):
        raise SettingsError(f"study-until = {until!r}: the study is over")
    check_data_settings(settings.data)

    baselines = baselines_of(settings, run_config)
    folder = _folder_of(settings, run_id)
    jobs = [Job(settings, folder, run_id, runs_later=len(baselines))]
    for algo, settings_of_baseline in baselines.items():
        runs_later = len(baselines) - len(jobs)  # the baselines after this one
        baseline = Job(settings_of_baseline, folder, run_id, algo, runs_later)
        jobs.append(_with_resume_if_begun(baseline))

    if not settings.run.resume:
        for job in jobs:
            check_free(job.folder)
    return jobs


def _folder_of(settings: Settings, run_id: int) -> Path:
    """Return the folder of a run in ``out-dir``.

    It is named by ``run-name``, or else by the time, the algorithm, the data, and the first digits
    of Flower's id of the run.
    """
    name = settings.run.run_name
    if not name:
        began = time.strftime("%Y%m%d-%H%M%S")
        data = as_file_name(settings.data.dataset)
        if settings.data.partition == "own":
            data = "own-data"
        name = f"{began}-{settings.run.algo}-{data}-{str(run_id)[:6]}"
    return (Path(settings.run.out_dir).expanduser() / name).resolve()


def _with_resume_if_begun(baseline: Job) -> Job:
    """Return a baseline whose ``resume`` is false if its folder has nothing to go on from.

    A resumed run may have been stopped before this baseline began, which then starts anew.
    """
    folder = baseline.folder
    has_begun = bool(RunFolder(folder).checkpoints()) or (folder / SUMMARY).exists()
    settings = baseline.settings
    run = replace(settings.run, resume=settings.run.resume and has_begun)
    return replace(baseline, settings=replace(settings, run=run))
