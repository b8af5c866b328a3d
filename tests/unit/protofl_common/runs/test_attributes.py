"""What of a half lives on: every kind of attribute through a file, into a freshly built owner."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protofl_common.basics.tensorfile import read_tensors, write_tensors
from protofl_common.maths.prototypes import Prototypes
from protofl_common.runs.attributes import pack_attributes, restore_attributes

CPU = torch.device("cpu")
KEPT = ("model", "parameter", "tensor", "optimizer", "generator", "prototypes", "absent", "table")


class Half:
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        self.parameter = nn.Parameter(torch.zeros(4))
        self.tensor = torch.zeros(2, dtype=torch.bool)
        self.optimizer = torch.optim.SGD(
            [*self.model.parameters(), self.parameter], lr=0.1, momentum=0.9
        )
        self.generator = torch.Generator().manual_seed(0)
        self.prototypes: Prototypes | None = None
        self.absent: Prototypes | None = None
        self.table: dict[str, Any] = dict.fromkeys(
            ("plain", "site-1", "a:b")
        )  # not the order of names

    def live(self) -> None:
        (
            self.model(torch.rand(5, 3)).square().sum() + (self.parameter - 1).square().sum()
        ).backward()
        self.optimizer.step()
        self.tensor[1] = True
        torch.rand(3, generator=self.generator)
        self.prototypes = Prototypes(torch.rand(3, 4), torch.arange(3), torch.tensor([5, 1, 2]))
        counted = Prototypes(torch.rand(1, 4), torch.tensor([7]), torch.tensor([9]))
        deep = {"deep": {"deeper": torch.ones(1), "site.2": some_prototypes(1)}, "beside": counted}
        self.table = {"plain": torch.arange(3), "site-1": some_prototypes(2), "a:b": deep}


def some_prototypes(rows: int) -> Prototypes:
    return Prototypes(torch.rand(rows, 4), torch.arange(rows))


def through_a_file(entries: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    write_tensors(path / "state.safetensors", entries, {"format": "test"})
    return read_tensors(path / "state.safetensors", CPU)[0]


def assert_same(found: Any, wanted: Any) -> None:
    match wanted:
        case Prototypes():
            assert isinstance(found, Prototypes)
            assert torch.equal(found.means, wanted.means)
            assert torch.equal(found.labels, wanted.labels)
            assert_same(found.counts, wanted.counts)
        case Tensor():
            assert torch.equal(found, wanted)
            assert found.dtype == wanted.dtype
        case dict():
            assert found.keys() == wanted.keys()
            for name, value in wanted.items():
                assert_same(found[name], value)
        case _:
            assert found == wanted


def test_every_kind_survives(tmp_path: Path) -> None:
    lived, fresh = Half(), Half()
    lived.live()
    parameter, model = fresh.parameter, fresh.model
    restore_attributes(fresh, KEPT, through_a_file(pack_attributes(lived, KEPT), tmp_path))
    assert_same(dict(fresh.model.state_dict()), dict(lived.model.state_dict()))
    assert fresh.parameter is parameter  # the optimizer holds it
    assert fresh.model is model
    assert_same(fresh.parameter.data, lived.parameter.data)
    assert_same(fresh.tensor, lived.tensor)
    assert_same(fresh.prototypes, lived.prototypes)
    assert fresh.absent is None
    assert_same(fresh.table, lived.table)
    assert list(fresh.table) == list(lived.table)
    momenta = [half.optimizer.state_dict()["state"] for half in (fresh, lived)]
    assert len(momenta[1]) == 5
    assert_same(*momenta)
    assert torch.equal(
        torch.rand(4, generator=fresh.generator), torch.rand(4, generator=lived.generator)
    )


def test_names_of_entries_which_are_copies() -> None:
    lived = Half()
    lived.live()
    names = set(pack_attributes(lived, ("model", "tensor", "prototypes", "absent", "table")))
    assert {
        "model/0.weight",
        "model/1.running_mean",
        "tensor",
        "prototypes:means",
        "prototypes:labels",
    } <= names
    assert {
        "table/plain",
        "table/site-1:means",
        "table/a:b/deep/site.2:labels",
        "table/a:b/beside:counts",
    } <= names
    assert not any(name.startswith("absent") for name in names)
    entry, before = (
        pack_attributes(lived, ("parameter",))["parameter"],
        lived.parameter.detach().clone(),
    )
    with torch.no_grad():
        lived.parameter.add_(1)
    assert torch.equal(entry, before)
    assert not entry.requires_grad
    odd = SimpleNamespace(value={"a": {"b": "text"}})
    with pytest.raises(TypeError, match="value/a/b: a checkpoint cannot hold a str"):
        pack_attributes(odd, ("value",))


def test_what_was_none_or_empty_is_so_again(tmp_path: Path) -> None:
    fresh = Half()
    restore_attributes(fresh, KEPT, through_a_file(pack_attributes(Half(), KEPT), tmp_path))
    assert fresh.prototypes is None
    assert fresh.table == {}
    assert fresh.optimizer.state_dict()["state"] == {}


def test_an_attribute_that_is_none_when_built_may_become_anything_of_tensors(
    tmp_path: Path,
) -> None:
    for value in (
        torch.ones(2),
        some_prototypes(2),
        {"a": torch.ones(1), "b": {"c": some_prototypes(1)}},
    ):
        lived, fresh = SimpleNamespace(value=value), SimpleNamespace(value=None)
        restore_attributes(
            fresh, ("value",), through_a_file(pack_attributes(lived, ("value",)), tmp_path)
        )
        assert_same(fresh.value, value)


def test_names_that_begin_alike_do_not_mix(tmp_path: Path) -> None:
    class Alike:
        def __init__(self, of: float) -> None:
            self.w: Any = {"x": torch.full((1,), of)} if of else {}
            self.w2: Any = torch.full((1,), 2 * of)
            self.wx: Any = Prototypes(torch.full((1, 1), 3 * of), torch.tensor([0])) if of else None

    lived, fresh, names = Alike(1.0), Alike(0.0), ("w", "w2", "wx")
    restore_attributes(fresh, names, through_a_file(pack_attributes(lived, names), tmp_path))
    assert_same(vars(fresh), vars(lived))


def test_a_dictionary_of_modules_and_generators_goes_on_in_place(tmp_path: Path) -> None:
    class Many:
        def __init__(self) -> None:
            self.parts: dict[str, Any] = {
                "critic": nn.Linear(2, 2),
                "dice": torch.Generator().manual_seed(0),
            }
            self.parts["inner"] = {"optimizer": torch.optim.Adam(self.parts["critic"].parameters())}

    lived, fresh = Many(), Many()
    lived.parts["critic"](torch.ones(1, 2)).sum().backward()
    lived.parts["inner"]["optimizer"].step()
    torch.rand(3, generator=lived.parts["dice"])
    critic = fresh.parts["critic"]
    restore_attributes(
        fresh, ("parts",), through_a_file(pack_attributes(lived, ("parts",)), tmp_path)
    )
    assert fresh.parts["critic"] is critic
    assert_same(dict(critic.state_dict()), dict(lived.parts["critic"].state_dict()))
    assert torch.equal(
        torch.rand(4, generator=fresh.parts["dice"]), torch.rand(4, generator=lived.parts["dice"])
    )
    assert_same(
        *(half.parts["inner"]["optimizer"].state_dict()["state"] for half in (fresh, lived))
    )
