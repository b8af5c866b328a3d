"""The client's private file: round trip, atomicity, and clear errors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from client_app.state import ClientState, StateError, StateFile, flatten_optimizer, restore_optimizer

CPU = torch.device("cpu")


def some_state(round_number: int = 3) -> ClientState:
    return ClientState(11, round_number, "cnn4", {"w": torch.randn(3, 2), "n": torch.tensor(4)}, {"0.m": torch.ones(2)})


def test_round_trip(tmp_path: Path) -> None:
    file, state = StateFile(tmp_path / "new" / "folder", "site-1"), some_state()
    assert file.load(11, "cnn4", CPU) is None
    file.save(state)
    found = file.load(11, "cnn4", CPU)
    assert found is not None
    assert (found.round, found.arch) == (3, "cnn4")
    assert all(torch.equal(found.model[name], value) for name, value in state.model.items())
    assert torch.equal(found.optimizer["0.m"], torch.ones(2))
    assert [path.name for path in file.path.parent.iterdir()] == ["site-1.safetensors"]


def test_a_state_of_another_run_is_not_used(tmp_path: Path) -> None:
    file = StateFile(tmp_path, "site-1")
    file.save(some_state())
    assert file.load(12, "cnn4", CPU) is None


def test_a_state_of_another_architecture_is_an_error(tmp_path: Path) -> None:
    file = StateFile(tmp_path, "site-1")
    file.save(some_state())
    with pytest.raises(StateError, match="holds a cnn4, but this client is now a resnet10"):
        file.load(11, "resnet10", CPU)


def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    file = StateFile(tmp_path, "site-1")
    file.path.write_bytes(b"not a state at all")
    with pytest.raises(StateError, match=r"site-1\.safetensors cannot be read .* remove it"):
        file.load(11, "cnn4", CPU)


def test_a_failed_write_leaves_the_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = StateFile(tmp_path, "site-1")
    file.save(some_state(3))

    def full_disk(*args: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        file.save(some_state(4))
    monkeypatch.undo()
    found = file.load(11, "cnn4", CPU)
    assert found is not None
    assert found.round == 3
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_an_optimizer_goes_on_where_it_stopped(kind: str, tmp_path: Path) -> None:
    def fresh() -> tuple[nn.Linear, torch.optim.Optimizer]:
        torch.manual_seed(0)
        layer = nn.Linear(4, 2)
        make = {"sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "adam": lambda p: torch.optim.Adam(p)}
        return layer, make[kind](layer.parameters())

    def steps(layer: nn.Linear, optimizer: torch.optim.Optimizer, number: int) -> None:
        for i in range(number):
            optimizer.zero_grad()
            layer(torch.full((3, 4), float(i))).square().sum().backward()
            optimizer.step()

    through, optimizer = fresh()
    steps(through, optimizer, 2)
    file = StateFile(tmp_path, "s")
    file.save(ClientState(1, 1, "linear", through.state_dict(), flatten_optimizer(optimizer)))
    steps(through, optimizer, 2)

    found = file.load(1, "linear", CPU)
    assert found is not None
    stopped, resumed = fresh()
    stopped.load_state_dict(found.model)
    restore_optimizer(resumed, found.optimizer)
    steps(stopped, resumed, 2)
    assert torch.equal(through.weight, stopped.weight)
