"""The places of what never leaves a client: the states of its model, its privacy ledger, its answers and secrets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

from client_app.state import StateError, StateFolder
from protofl_common.basics.files import digest, make_private
from protofl_common.experiment.node import NodeConfig
from protofl_common.experiment.settings import Settings
from protofl_common.wire.limits import RefusedMessage
from protofl_common.wire.records import Instructions


@dataclass(frozen=True)
class Folders:
    """The files of one client in the Flower run ``run_id``.

    At a real site no name that the server chooses leads to the files of another run.
    """

    settings: Settings
    node: NodeConfig
    run_id: int

    @property
    def root(self) -> Path:
        """``state-dir``; a simulated client's is the folder of results."""
        return Path(self.settings.machine.state_dir or self.settings.run.out_dir)

    def check(self) -> None:
        """StateError if a site could not store a model: it must show before the first round, not after its training."""
        if not self.node.is_site:
            return
        try:
            make_private(self.root)
            with TemporaryFile(dir=self.root) as probe:
                probe.write(bytes(2**16))  # a full disk takes the name of a file, and nothing in it
        except OSError as error:
            raise StateError(f"state-dir: {self.root.absolute()} cannot be written ({error})") from error

    def states(self, instructions: Instructions) -> StateFolder:
        """Return the folder of this client's state: at a real site, every study has one of its own.

        RefusedMessage for another Flower run, or a round too many.
        """
        run_history, rounds = instructions.run_history, self.settings.run.rounds
        if instructions.round > rounds:
            raise RefusedMessage(f"round.round is {instructions.round} in a run of {rounds} rounds")
        if run_history.run_id != self.run_id:
            raise RefusedMessage(f"round.run_history is {run_history.text!r} in the Flower run {self.run_id}")
        private = "" if self.settings.privacy.dp == "none" else ", with differential privacy"
        use = f"{self.settings.run.algo} ({digest(repr(self.settings.exchange))}){private}"
        name, is_site = instructions.run_name, self.node.is_site
        folder = self.root / (f"{name}-{run_history.first}" if is_site else name) / "clients"  # names may meet
        return StateFolder(folder, self.node.name, run_history, wary=is_site, use=use)

    def ledger(self, run_name: str) -> Path:
        """Return the file of the privacy ledger: one for all runs; in a simulation, one for each.

        At a site it is the data's, not the name's: a site with a new name has spent what it had spent.
        """
        if not self.node.is_site:
            return self._of_run(run_name) / "privacy.json"
        folder = self.settings.data.data_dir and str(Path(self.settings.data.data_dir).expanduser().resolve())
        return self.root / "privacy" / f"{digest(folder, self.node.domain, self.node.partition)}.json"

    @property
    def answers(self) -> Path:
        """The file in which a real site notes the questions that it has answered."""
        return self.root / "privacy" / f"{self.node.name}.answered"

    def secret(self, run_name: str) -> Path:
        """Return the file of the secret of a sum; at a site it does not depend on the server's name for the run."""
        if not self.node.is_site:
            return self._of_run(run_name) / "secagg.json"
        return self.root / "privacy" / f"{self.node.name}-{self.run_id}-{self.settings.run.algo}.secagg"

    def _of_run(self, run_name: str) -> Path:
        return self.root / run_name / "clients" / self.node.name
