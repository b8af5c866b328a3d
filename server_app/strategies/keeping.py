"""From the attributes that an algorithm names in ``keeps`` to tensors of a checkpoint, and back.

An attribute may be a tensor or parameter, prototypes or None, a module, an optimizer, a random generator, or a
dictionary of tensors or prototypes by name. Entries are named ``seen_C``, ``weights.body.0.weight``, ``sets.site-1``;
prototypes take two entries, with ``:means`` and ``:labels`` after the name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from protofl_common.prototypes import Prototypes
from protofl_common.tensorfile import flatten_optimizer, restore_optimizer

_MEANS, _LABELS = ":means", ":labels"


def packed(owner: object, names: Iterable[str]) -> dict[str, Tensor]:
    """The named attributes as tensors of their own, on the CPU."""
    entries = {key: value for name in names for key, value in _entries(name, getattr(owner, name)).items()}
    return {key: value.detach().cpu().clone() for key, value in entries.items()}


def put_back(owner: object, names: Iterable[str], entries: Mapping[str, Tensor]) -> None:
    """Set the attributes of a freshly built ``owner`` to what `packed` gave."""
    for name in names:
        inner = {key.removeprefix(f"{name}."): value for key, value in entries.items() if key.startswith(f"{name}.")}
        match getattr(owner, name):
            case torch.Generator() as generator:
                generator.set_state(entries[name])
            case torch.optim.Optimizer() as optimizer:
                restore_optimizer(optimizer, inner)
            case nn.Module() as module:
                module.load_state_dict(inner)
            case Tensor() as tensor:  # in place: an optimizer may hold it
                tensor.data.copy_(entries[name])
            case dict():
                setattr(owner, name, _by_name(inner))
            case _:
                setattr(owner, name, _by_name({key: entries[key] for key in _of(name, entries)}).get(name))


def _entries(name: str, value: Any) -> dict[str, Tensor]:
    match value:
        case None:
            return {}
        case Prototypes():
            return {name + _MEANS: value.means, name + _LABELS: value.labels}
        case Tensor():
            return {name: value}
        case torch.Generator():
            return {name: value.get_state()}
        case torch.optim.Optimizer():
            inner: Mapping[str, Any] = flatten_optimizer(value)
        case nn.Module():
            inner = value.state_dict()
        case dict():
            inner = value
        case _:
            raise TypeError(f"{name}: a checkpoint cannot hold a {type(value).__name__}")
    return {key: tensor for part, one in inner.items() for key, tensor in _entries(f"{name}.{part}", one).items()}


def _of(name: str, entries: Mapping[str, Tensor]) -> list[str]:
    return [key for key in (name + _MEANS, name + _LABELS) if key in entries]


def _by_name(entries: Mapping[str, Tensor]) -> dict[str, Any]:
    """Tensors by name, or prototypes where there are means and labels of a name; in the order of the names stored."""
    found: dict[str, Any] = {}
    for key, value in entries.items():
        if key.endswith(_MEANS):
            name = key.removesuffix(_MEANS)
            found[name] = Prototypes(value, entries[name + _LABELS])
        elif not key.endswith(_LABELS):
            found[key] = value
    return found
