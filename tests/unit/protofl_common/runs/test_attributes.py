"""What of a half lives on: every kind of attribute through a file, into a freshly built owner."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protofl_common.basics.tensorfile import read_tensors, write_tensors
from protofl_common.maths.prototypes import Prototypes
from protofl_common.runs.attributes import pack_attributes, restore_attributes

CPU = torch.device("cpu")
KEPT = (
    "model",
    "parameter",
    "tensor",
    "optimizer",
    "generator",
    "prototypes",
    "absent",
    "table",
    "parts",
)


class Half:
    """An algorithm's half with an attribute of each kind that can be kept over rounds."""

    def __init__(self):
        self.model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        self.parameter = nn.Parameter(torch.zeros(4))
        self.tensor = torch.zeros(2, dtype=torch.bool)
        parameters = [*self.model.parameters(), self.parameter]
        self.optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        self.generator = torch.Generator().manual_seed(0)
        self.prototypes: Prototypes | None = None
        self.absent: Prototypes | None = None
        # their order, which must stay, is not that of the names
        self.table: dict[str, Any] = {"plain": None, "site-1": None, "a:b": None}
        critic = nn.Linear(2, 2)
        inner = {"optimizer": torch.optim.Adam(critic.parameters())}
        dice = torch.Generator().manual_seed(0)
        self.parts: dict[str, Any] = {"critic": critic, "dice": dice, "inner": inner}

    def live(self):
        """Change every attribute."""
        loss = self.model(torch.rand(5, 3)).square().sum() + (self.parameter - 1).square().sum()
        loss.backward()
        self.optimizer.step()
        self.tensor[1] = True
        torch.rand(3, generator=self.generator)
        self.parts["critic"](torch.ones(1, 2)).sum().backward()
        self.parts["inner"]["optimizer"].step()
        torch.rand(3, generator=self.parts["dice"])
        self.prototypes = Prototypes(torch.rand(3, 4), torch.arange(3), torch.tensor([5, 1, 2]))
        self.table = {
            "plain": torch.arange(3),
            "site-1": some_prototypes(2),
            "a:b": {
                "deep": {"deeper": torch.ones(1), "site.2": some_prototypes(1)},
                "beside": Prototypes(torch.rand(1, 4), torch.tensor([7]), torch.tensor([9])),
            },
        }


def some_prototypes(rows):
    return Prototypes(torch.rand(rows, 4), torch.arange(rows))


def handed_over(source, target, names, folder):
    """Write the attributes of ``source`` into a file, and restore those of ``target`` from it."""
    file = folder / "state.safetensors"
    write_tensors(file, pack_attributes(source, names), {"format": "test"})
    entries, _ = read_tensors(file, CPU)
    restore_attributes(target, names, entries)


def assert_same(found, wanted):
    """``found`` equals ``wanted``, tensors in their type too."""
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


def test_every_kind_of_attribute_survives_a_file(tmp_path):
    """Attributes of each kind that can be kept are, in a fresh object, as they were in the old."""
    lived = Half()
    lived.live()
    fresh = Half()
    parameter = fresh.parameter
    model = fresh.model
    critic = fresh.parts["critic"]

    handed_over(lived, fresh, KEPT, tmp_path)

    assert fresh.parameter is parameter  # the optimizer holds it
    assert fresh.model is model
    assert_same(dict(fresh.model.state_dict()), dict(lived.model.state_dict()))
    assert_same(fresh.parameter.data, lived.parameter.data)
    assert_same(fresh.tensor, lived.tensor)
    assert_same(fresh.prototypes, lived.prototypes)
    assert fresh.absent is None
    assert_same(fresh.table, lived.table)
    assert list(fresh.table) == list(lived.table)

    # momentum of two weights and two biases, and of ``parameter``
    assert len(lived.optimizer.state_dict()["state"]) == 5
    assert_same_state(fresh.optimizer, lived.optimizer)
    assert_same_draws(fresh.generator, lived.generator)

    assert fresh.parts["critic"] is critic
    assert_same(dict(critic.state_dict()), dict(lived.parts["critic"].state_dict()))
    assert_same_draws(fresh.parts["dice"], lived.parts["dice"])
    assert_same_state(fresh.parts["inner"]["optimizer"], lived.parts["inner"]["optimizer"])


def assert_same_state(one, other):
    assert_same(one.state_dict()["state"], other.state_dict()["state"])


def assert_same_draws(one, other):
    assert torch.equal(torch.rand(4, generator=one), torch.rand(4, generator=other))


def test_entries_are_copies():
    """The attribute may change while its entry is written."""
    half = Half()
    entry = pack_attributes(half, ("parameter",))["parameter"]
    before = half.parameter.detach().clone()

    with torch.no_grad():
        half.parameter.add_(1)

    assert torch.equal(entry, before)
    assert not entry.requires_grad


def test_what_is_no_tensor_is_named():
    owner = SimpleNamespace(value={"a": {"b": "text"}})

    with pytest.raises(TypeError, match="value/a/b: a checkpoint cannot hold a str"):
        pack_attributes(owner, ("value",))


def test_what_was_none_or_empty_is_so_again(tmp_path):
    fresh = Half()
    handed_over(Half(), fresh, KEPT, tmp_path)

    assert fresh.prototypes is None
    assert fresh.table == {}
    assert fresh.optimizer.state_dict()["state"] == {}


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2),
        some_prototypes(2),
        {"a": torch.ones(1), "b": {"c": some_prototypes(1)}},
    ],
)
def test_an_attribute_that_is_none_when_built_may_become_anything_of_tensors(value, tmp_path):
    fresh = SimpleNamespace(value=None)
    handed_over(SimpleNamespace(value=value), fresh, ("value",), tmp_path)

    assert_same(fresh.value, value)


def test_names_that_begin_alike_do_not_mix(tmp_path):
    lived = SimpleNamespace(w={"x": torch.ones(1)}, w2=torch.tensor([2.0]), wx=some_prototypes(1))
    fresh = SimpleNamespace(w={}, w2=torch.zeros(1), wx=None)
    handed_over(lived, fresh, ("w", "w2", "wx"), tmp_path)

    assert_same(vars(fresh), vars(lived))
