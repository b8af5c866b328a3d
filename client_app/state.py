"""What never leaves this client: its model, its optimizer and its own prototypes, in one file per run.

The file is safetensors, written beside and then renamed, so a killed client finds either the old or the new state.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

FORMAT = "protofl-client-state-1"


class StateError(RuntimeError):
    """The state on disk cannot be used; the message says which file and why."""


@dataclass(frozen=True)
class ClientState:
    """A client after one of its rounds."""

    run_id: int
    round: int
    arch: str
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor] = field(default_factory=dict)


class StateFile:
    """The state of one client in one run: ``<folder>/<site>.safetensors``."""

    def __init__(self, folder: Path, site: str) -> None:
        self.path = folder / f"{site}.safetensors"

    def load(self, run_id: int, arch: str, device: torch.device) -> ClientState | None:
        """The last saved state of this run, or None before the first (a state of another run is not used).

        Raises
        ------
        StateError
            If the file is damaged, or was written for another architecture.
        """
        if not self.path.exists():
            return None
        try:
            with safe_open(self.path, framework="pt", device=str(device)) as file:
                facts = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise StateError(f"{self.path} cannot be read ({error}); remove it to start afresh") from error
        if facts.get("format") != FORMAT:
            raise StateError(f"{self.path} is not a state of this version ({FORMAT}); remove it to start afresh")
        if facts["run-id"] != str(run_id):
            return None
        if facts["arch"] != arch:
            raise StateError(f"{self.path} holds a {facts['arch']}, but this client is now a {arch}")
        parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}}
        for name, value in tensors.items():
            part, _, key = name.partition(".")
            parts[part][key] = value
        return ClientState(run_id, int(facts["round"]), arch, parts["model"], parts["optimizer"])

    def save(self, state: ClientState) -> None:
        """Replace the saved state in one step."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {f"model.{name}": value.contiguous() for name, value in state.model.items()}
        tensors |= {f"optimizer.{name}": value.contiguous() for name, value in state.optimizer.items()}
        facts = {"format": FORMAT, "run-id": str(state.run_id), "round": str(state.round), "arch": state.arch}
        beside = self.path.with_suffix(f".{os.getpid()}.tmp")
        try:
            save_file(tensors, beside, metadata=facts)
            os.replace(beside, self.path)
        finally:
            beside.unlink(missing_ok=True)


def flatten_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors as ``<parameter index>.<name>``."""
    return {
        f"{index}.{name}": torch.as_tensor(value)
        for index, entry in optimizer.state_dict()["state"].items()
        for name, value in entry.items()
        if value is not None
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """The inverse of :func:`flatten_optimizer`, for an optimizer over the same parameters."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
