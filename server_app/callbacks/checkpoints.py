"""A checkpoint after each round, and the settings by which the run can be repeated or resumed."""

import json
import shlex
import time
from dataclasses import replace
from pathlib import Path

from protofl_common.basics.files import sync, sync_disk_of, write_text
from protofl_common.experiment.settings import Settings, to_run_config
from protofl_common.runs.folder import METRICS, SETTINGS, RoundRow
from server_app.callbacks.base import ActiveRun, Callback
from server_app.run.replies import RoundResult


class Checkpoints(Callback):
    """Writes a checkpoint before the first round and after each, so that the run can be resumed."""

    def on_start(self, run: ActiveRun) -> None:
        (run.folder / METRICS).touch()  # `write_checkpoint` notes its length
        write_checkpoint(run, run.start.round)

    def on_round(self, run: ActiveRun, row: RoundRow, result: RoundResult) -> None:
        if not all(card.real for card in run.federation.cards.values()):
            # simulated clients do not wait for the disk with their states, and the checkpoint
            # must not be there without these
            sync_disk_of(run.folder)
            state_dir = Path(run.settings.machine.state_dir).expanduser()
            if run.settings.machine.state_dir and state_dir.is_dir():
                sync_disk_of(state_dir)
        if not result.final:
            write_checkpoint(run, result.number)


def write_checkpoint(run: ActiveRun, number: int) -> None:
    """Write the checkpoint after round ``number``.

    Two TOML files are written once: with the settings to repeat the run, and with those to resume
    it.
    """
    metrics = run.folder / METRICS
    federation = run.federation
    sync(metrics)  # its rows must be on the disk before the checkpoint
    checkpoint = replace(
        run.start,
        round=number,
        sites=tuple(federation.cards),
        owners=federation.owners,
        counted=federation.counted,
        num_partitions=federation.num_partitions,
        seconds=time.monotonic() - run.began,
        metrics_bytes=metrics.stat().st_size,
        state={**run.strategy.present_state(), **run.exchange.late.present_state()},
    )
    checkpoint.write(run.folder)

    for name, resumed in ((SETTINGS, ""), ("resume.toml", run.folder.name)):
        file = run.folder / name
        if not file.exists():
            write_text(file, as_toml(run.settings, file, federation.num_partitions, resumed))


def as_toml(settings: Settings, file: Path, num_partitions: int, resumed: str = "") -> str:
    """Return the run's settings as the text of a flat TOML file for ``flwr run --run-config``.

    With ``resumed``, they resume the run of that name. The comment at the top has the command, with
    the number of simulated clients where a data set is divided among them. Where sites bring their
    own data, FEDERATION stands for the connection, whose name a ServerApp does not know.
    """
    values = to_run_config(settings)
    to_do = "Run it again, under another run-name"
    if resumed:
        values = {**values, "resume": True, "run-name": resumed}
        to_do = "Let it go on after a stop"

    config = f"--run-config {shlex.quote(str(file))}"
    command = f"flwr run . FEDERATION {config}"
    if num_partitions:
        federation = f"num-supernodes={num_partitions} client-resources-num-cpus=1"
        command = f"flwr run . {config} --federation-config '{federation}'"

    lines = [f"# The settings of this run. {to_do}:", f"# {command} --stream"]
    for key, value in values.items():
        lines.append(f"{key} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"
