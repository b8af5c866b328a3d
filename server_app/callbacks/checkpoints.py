"""A checkpoint after each round, and the settings by which the run can be repeated or resumed."""

import json
import os
import shlex
import time
from dataclasses import replace
from pathlib import Path

from protofl_common.basics.files import sync, write_text
from protofl_common.experiment.settings import Settings, to_run_config
from protofl_common.runs.folder import METRICS, SETTINGS, RoundRow
from server_app.callbacks.base import ActiveRun, Callback
from server_app.replies import RoundResult


class Checkpoints(Callback):
    """From the first checkpoint on, before the first round, the run can be resumed."""

    def on_start(self, run: ActiveRun) -> None:
        (run.folder / METRICS).touch()
        write_checkpoint(run, run.start.round)

    def on_round(self, run: ActiveRun, row: RoundRow, result: RoundResult) -> None:
        if not all(card.real for card in run.federation.cards.values()):
            os.sync()  # what the clients have written, before anything relies on it; sites see to that themselves
        if not result.final:
            write_checkpoint(run, result.number)


def write_checkpoint(run: ActiveRun, number: int) -> None:
    """Write the state after round ``number`` and, with the first one, the settings."""
    metrics, federation = run.folder / METRICS, run.federation
    sync(metrics)
    replace(
        run.start,
        round=number,
        sites=tuple(federation.cards),
        owners=federation.owners,
        counted=federation.counted,
        num_partitions=federation.num_partitions,
        seconds=time.monotonic() - run.began,
        metrics_bytes=metrics.stat().st_size,
        state=run.strategy.present_state(),
    ).write(run.folder)
    for file, name in ((SETTINGS, ""), ("resume.toml", run.folder.name)):
        if not (run.folder / file).exists():
            write_text(run.folder / file, as_toml(run.settings, run.folder / file, federation.num_partitions, name))


def as_toml(settings: Settings, file: Path, num_partitions: int, resumed: str = "") -> str:
    """The run's settings as a flat TOML file that ``flwr run --run-config`` takes; ``resumed``: to resume that run.

    Like a recipe, it says with how many simulated clients, where the data set is divided among them. Where sites bring
    their own, FEDERATION stands for the connection, whose name a ServerApp does not know.
    """
    values = to_run_config(settings) | ({"resume": True, "run-name": resumed} if resumed else {})
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
    among = f" --federation-config 'num-supernodes={num_partitions} client-resources-num-cpus=1'"
    where, options = (".", among) if num_partitions else (". FEDERATION", "")
    command = f"flwr run {where} --run-config {shlex.quote(str(file))}{options}"
    to_do = "Let it go on after a stop" if resumed else "Run it again, under another run-name"
    return f"# The settings of this run. {to_do}:\n# {command} --stream\n" + "\n".join(lines) + "\n"
