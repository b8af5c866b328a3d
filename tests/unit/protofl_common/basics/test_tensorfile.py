"""A file of tensors that comes back as it was, or not at all."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from protofl_common.basics.files import TensorFileError
from protofl_common.basics.tensorfile import read_tensors, write_tensors
from tests.support.accidents import flip_a_bit

CPU = torch.device("cpu")
FACTS = {"format": "some-1", "facts": '{"sites": ["nörth"]}'}


def tensors() -> dict[str, Tensor]:
    """Of several types and shapes, a scalar and an empty one among them."""
    return {"a": torch.tensor([[0.0, -1.5], [2.0, 3.0]]).T, "half": torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
        "count": torch.tensor(7), "seen": torch.tensor([True, False]), "none": torch.zeros(0, 3)}  # fmt: skip


def test_round_trip(tmp_path: Path) -> None:
    write_tensors(tmp_path / "x", tensors(), FACTS)
    found, facts = read_tensors(tmp_path / "x", CPU)
    assert facts == FACTS
    assert found.keys() == tensors().keys()
    for name, value in tensors().items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value)


def test_a_flipped_bit_anywhere_is_noticed(tmp_path: Path) -> None:
    """Or changes nothing but the name of the checksum."""
    write_tensors(tmp_path / "x", tensors(), FACTS)
    whole = (tmp_path / "x").read_bytes()
    harmless = 0
    for bit in range(0, 8 * len(whole), 11):
        flip_a_bit(tmp_path / "x", bit)
        try:
            found, _ = read_tensors(tmp_path / "x", CPU)
            assert all(torch.equal(found[name], value) for name, value in tensors().items())
            harmless += 1
        except TensorFileError:
            pass
        (tmp_path / "x").write_bytes(whole)
    assert harmless <= 8 * len("checksum") / 11 + 1


def test_a_truncated_or_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    write_tensors(tmp_path / "x", tensors(), FACTS)
    whole = (tmp_path / "x").read_bytes()
    for length in (0, 7, 100, len(whole) - 1):
        (tmp_path / "x").write_bytes(whole[:length])
        with pytest.raises(TensorFileError, match="x cannot be read"):
            read_tensors(tmp_path / "x", CPU)
    with pytest.raises(TensorFileError, match="y cannot be read"):
        read_tensors(tmp_path / "y", CPU)


def test_files_without_a_checksum_are_read_and_ours_are_plain_safetensors(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "old", metadata={"format": "some-0"})
    found, facts = read_tensors(tmp_path / "old", CPU)
    assert (found["a"].tolist(), facts) == ([1.0, 1.0], {"format": "some-0"})
    write_tensors(tmp_path / "x", tensors(), FACTS)
    assert torch.equal(load_file(tmp_path / "x")["a"], tensors()["a"])
