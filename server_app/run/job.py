"""The jobs of the server, read from Flower's context and checked before any site is asked."""

import time
from dataclasses import dataclass, replace
from pathlib import Path

from flwr.app import Context

from protofl_common.basics.text import as_file_name
from protofl_common.config.options import SettingsError
from protofl_common.data import check_data_settings
from protofl_common.experiment.node import allow_named
from protofl_common.experiment.settings import Settings, baselines_of
from protofl_common.experiment.study import Study, is_past
from protofl_common.runs.folder import SUMMARY, RunFolder, baseline_folder, checkpoints
from server_app.run.checkpoint import check_free, check_same


@dataclass(frozen=True)
class Job:
    """A run, or a baseline of a run: its settings, and where its results go."""

    settings: Settings
    main_folder: Path
    """The run's folder; that of a baseline lies beside it."""
    run_id: int  # Flower's
    baseline: str = ""  # The algorithm, where this is a baseline
    runs_later: int = 0  # How many runs follow this one

    @property
    def folder(self) -> Path:
        if not self.baseline:
            return self.main_folder
        return baseline_folder(self.main_folder, self.baseline)

    def is_complete(self) -> bool:
        """True if this job is resumed and was finished before.

        CannotResume if it was finished with other settings.
        """
        settings = self.settings
        if not settings.run.resume or not (self.folder / SUMMARY).exists():
            return False
        check_same(RunFolder(self.folder).finished_summary()["settings"], settings, self.folder)
        return True


def open_jobs(context: Context) -> list[Job]:
    """Return the run that Flower was asked for, and then its baselines.

    SettingsError or DataError where a setting is wrong, the study is over, or a folder holds
    another run. Python modules that the settings name may be imported from then on.
    """
    allow_named(context.run_config)  # whoever submits a run may name modules to import
    settings = Settings.from_run_config(context.run_config)
    until = Study.of(context.run_config).until
    if is_past(until):
        raise SettingsError(f"study-until = {until!r}: the study is over")
    check_data_settings(settings.data)

    baselines = baselines_of(settings, context.run_config)
    folder = _folder_of(settings, context.run_id)
    jobs = [Job(settings, folder, context.run_id, runs_later=len(baselines))]
    for algo, of_baseline in baselines.items():
        runs_later = len(baselines) - len(jobs)
        jobs.append(Job(of_baseline, folder, context.run_id, algo, runs_later))

    if not settings.run.resume:
        for job in jobs:
            check_free(job.folder)
    return jobs


def _folder_of(settings: Settings, run_id: int) -> Path:
    """Return the folder of a run in ``out-dir``.

    It is named by ``run-name``, or else by the time, the algorithm and the data.
    """
    name = settings.run.run_name
    if not name:
        began = time.strftime("%Y%m%d-%H%M%S")
        data = as_file_name(settings.data.dataset)
        if settings.data.partition == "own":
            data = "own-data"
        name = f"{began}-{settings.run.algo}-{data}-{str(run_id)[:6]}"
    return (Path(settings.run.out_dir).expanduser() / name).resolve()


def with_resume_if_begun(job: Job) -> Job:
    """Return the job of a baseline, with ``resume`` only if it has checkpoints to resume from.

    A resumed run may have been stopped before this baseline began, which then starts anew.
    """
    has_begun = job.settings.run.resume and bool(checkpoints(job.folder))
    run = replace(job.settings.run, resume=has_begun)
    return replace(job, settings=replace(job.settings, run=run))
