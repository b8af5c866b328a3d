"""From named attributes of an algorithm's half to the tensors of a checkpoint, and back.

Both halves use it. An attribute may be a tensor or parameter, prototypes, a module, an optimizer, a
random generator, None, or a dictionary of these by name, of any depth. Entries are named
``seen_C``, ``model/body.0.weight``, ``sets/site-1``, those of an optimizer
``sgd/0.momentum_buffer``, by parameter; prototypes take entries with ``:means``, ``:labels`` and,
where they have any, ``:counts`` after the name.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from protofl_common.maths.prototypes import Prototypes

_MEANS = ":means"
_LABELS = ":labels"
_COUNTS = ":counts"
_IN_PLACE = (torch.Generator, torch.optim.Optimizer, nn.Module, dict)


def pack_attributes(owner: object, names: Iterable[str]) -> dict[str, Tensor]:
    """Copy the named attributes to tensors on the CPU."""
    return {key: value.cpu().clone() for key, value in tensors_of(owner, names).items()}


def tensors_of(owner: object, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the tensors of the named attributes themselves, not copies, to be looked at now."""
    tensors = {}
    for name in names:
        for key, value in _entries(name, getattr(owner, name)).items():
            tensors[key] = value.detach()
    return tensors


def restore_attributes(owner: object, names: Iterable[str], entries: Mapping[str, Tensor]) -> None:
    """Set the attributes of a freshly built ``owner`` to what `pack_attributes` gave."""
    for name in names:
        value = getattr(owner, name)
        restored = _restored(value, name, entries)
        if restored is not value:
            setattr(owner, name, restored)


def dictionary_in(entries: Mapping[str, Tensor], name: str) -> dict[str, Any]:
    """Return the dictionary that the attribute ``name`` was, of tensors and dictionaries."""
    return _tree(_inner(entries, name))


def _inner(entries: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    prefix = f"{name}/"
    return {
        key.removeprefix(prefix): tensor
        for key, tensor in entries.items()
        if key.startswith(prefix)
    }


def _restored(value: Any, name: str, entries: Mapping[str, Tensor]) -> Any:
    """Restore in place where possible: an optimizer may hold a reference."""
    inner = _inner(entries, name)
    match value:
        case torch.Generator():
            value.set_state(entries[name].cpu())
        case torch.optim.Optimizer():
            _restore_optimizer(value, inner)
        case nn.Module():
            value.load_state_dict(inner)
        case Tensor():
            value.data.copy_(entries[name])
        case dict():
            return _restored_dict(value, inner)
        case _:
            if inner:
                return _tree(inner)
            own = (name, name + _MEANS, name + _LABELS, name + _COUNTS)
            return _tree({key: entries[key] for key in own if key in entries}).get(name)
    return value


def _restore_optimizer(optimizer: torch.optim.Optimizer, entries: Mapping[str, Tensor]) -> None:
    """Load entries such as ``0.momentum_buffer``: a parameter's number, and the state's name."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in entries.items():
        index, _, part = key.partition(".")
        state.setdefault(int(index), {})[part] = tensor
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _restored_dict(value: dict[str, Any], entries: Mapping[str, Tensor]) -> dict[str, Any]:
    """Build the dictionary anew, in its order: files sort theirs, and sums go by the order."""
    new = _tree(entries)
    for key, each in value.items():
        if isinstance(each, _IN_PLACE):
            new[key] = _restored(each, key, entries)
    return {key: new[key] for key in value | new if key in new}


def _entries(name: str, value: Any) -> dict[str, Tensor]:
    """Return the tensors of one attribute by the names they have in a checkpoint."""
    members: Mapping[str, Any]
    match value:
        case None:
            return {}
        case Prototypes():
            entries = {name + _MEANS: value.means, name + _LABELS: value.labels}
            if value.counts is not None:
                entries[name + _COUNTS] = value.counts
            return entries
        case Tensor():
            return {name: value}
        case torch.Generator():
            return {name: value.get_state()}
        case torch.optim.Optimizer():
            members = _optimizer_state(value)
        case nn.Module():
            members = value.state_dict()
        case dict():
            members = value
        case _:
            raise TypeError(f"{name}: a checkpoint cannot hold a {type(value).__name__}")
    entries = {}
    for key, member in members.items():
        entries |= _entries(f"{name}/{key}", member)
    return entries


def _optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    members = {}
    for index, state in optimizer.state_dict()["state"].items():
        for part, value in state.items():
            if value is not None:
                members[f"{index}.{part}"] = torch.as_tensor(value)
    return members


def _tree(entries: Mapping[str, Tensor]) -> dict[str, Any]:
    """Nest tensors by the slashes in their names, and make prototypes of means and labels."""
    tree: dict[str, Any] = {}
    for key, value in entries.items():
        *path, last = key.split("/")
        place = tree
        for name in path:
            place = place.setdefault(name, {})
        if last.endswith(_MEANS):
            whole = key.removesuffix(_MEANS)
            labels = entries[whole + _LABELS]
            counts = entries.get(whole + _COUNTS)
            place[last.removesuffix(_MEANS)] = Prototypes(value, labels, counts)
        elif not last.endswith((_LABELS, _COUNTS)):
            place[last] = value
    return tree
