"""From named attributes of an algorithm's half to the tensors of a checkpoint, and back.

Both halves use it. An attribute may be a tensor or parameter, prototypes, a module, an optimizer, a
random generator, None, or a dictionary of these by name, of any depth. Entries are named
``seen_C``, ``model/body.0.weight``, ``sets/site-1``, those of an optimizer
``sgd/0/momentum_buffer``, by parameter; prototypes take entries with ``:means``, ``:labels`` and,
where they have any, ``:counts`` after the name.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from protofl_common.maths.prototypes import Prototypes

_IN_PLACE = (torch.Generator, torch.optim.Optimizer, nn.Module, dict)


def pack_attributes(owner: object, names: Iterable[str]) -> dict[str, Tensor]:
    """Copy the named attributes to tensors on the CPU."""
    return {key: value.cpu().clone() for key, value in tensors_of(owner, names).items()}


def tensors_of(owner: object, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the tensors of the named attributes by the names of a checkpoint's entries.

    They share memory with the attributes: what is kept longer must be copied (`pack_attributes`).
    """
    tensors = {}
    for name in names:
        for key, value in _entries(name, getattr(owner, name)).items():
            tensors[key] = value.detach()
    return tensors


def restore_attributes(owner: object, names: Iterable[str], entries: Mapping[str, Tensor]) -> None:
    """Set the named attributes of a freshly built ``owner`` to the ``entries`` of a checkpoint.

    What the owner already has is changed in place where possible, as an optimizer may hold it.
    """
    for name in names:
        value = getattr(owner, name)
        restored = _restored(value, name, entries)
        if restored is not value:
            setattr(owner, name, restored)


def dictionary_in(entries: Mapping[str, Tensor], name: str) -> dict[str, Any]:
    """Return the dictionary that the attribute ``name`` was, from a checkpoint's ``entries``.

    It may hold tensors, prototypes and dictionaries. {} if it was empty, or has no entries.
    """
    return _tree(_inner(entries, name))


def _inner(entries: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return the entries below ``name``, as ``NAME/weight``, by the rest of their names."""
    start = f"{name}/"
    return {key.removeprefix(start): entries[key] for key in entries if key.startswith(start)}


def _restored(value: Any, name: str, entries: Mapping[str, Tensor]) -> Any:
    """Return what an attribute was, from the entries of its ``name``.

    ``value`` is what it is in a freshly built owner; it is changed in place and returned where
    possible, as an optimizer may hold a reference to it. A table of values is built anew, and so is
    what is None as yet, such as prototypes that come in the first round.
    """
    inner = _inner(entries, name)
    match value:
        case torch.Generator():
            value.set_state(entries[name].cpu())
        case torch.optim.Optimizer():
            # the learning rate and other options stay those of the new optimizer
            groups = value.state_dict()["param_groups"]
            state = {int(index): parts for index, parts in _tree(inner).items()}
            value.load_state_dict({"state": state, "param_groups": groups})
        case nn.Module():
            value.load_state_dict(inner)
        case Tensor():
            value.data.copy_(entries[name])
        case dict():
            return _restored_dict(value, inner)
        case _:  # nothing to change in place: prototypes, or None as yet
            return _tree(entries).get(name)
    return value


def _restored_dict(value: dict[str, Any], entries: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a dictionary of the entries, with the modules, optimizers and generators of ``value``.

    These are changed in place. Keys have the order of ``value``: files sort theirs, and sums of
    floats depend on the order.
    """
    restored = _tree(entries)
    for key, member in value.items():
        if isinstance(member, _IN_PLACE):
            restored[key] = _restored(member, key, entries)
    keys_in_order = value | restored  # those of ``value``, then what only the entries have
    return {key: restored[key] for key in keys_in_order if key in restored}


def _entries(name: str, value: Any) -> dict[str, Tensor]:
    """Return the tensors of an attribute, or of a member of one, by their names in a checkpoint."""
    members: dict[str, Any] = {}
    match value:
        case None:
            return {}
        case Prototypes():
            parts = vars(value).items()
            return {f"{name}:{part}": tensor for part, tensor in parts if tensor is not None}
        case Tensor():
            return {name: value}
        case torch.Generator():
            return {name: value.get_state()}
        case torch.optim.Optimizer():
            for index, state in value.state_dict()["state"].items():
                for part, number in state.items():
                    if number is not None:
                        members[f"{index}/{part}"] = torch.as_tensor(number)
        case nn.Module():
            members = value.state_dict()
        case dict():
            members = value
        case _:
            raise TypeError(f"{name}: a checkpoint cannot hold a {type(value).__name__}")
    entries: dict[str, Tensor] = {}
    for key, member in members.items():
        entries |= _entries(f"{name}/{key}", member)
    return entries


def _tree(entries: Mapping[str, Tensor]) -> dict[str, Any]:
    """Nest tensors in dictionaries by the slashes in their names.

    Prototypes are made of entries whose names end in ``:means``, ``:labels`` and ``:counts``.
    """
    tree: dict[str, Any] = {}
    for key, value in entries.items():
        *path, last = key.split("/")
        place = tree  # the dictionary that gets the entry
        for name in path:
            place = place.setdefault(name, {})
        name, _, part = last.rpartition(":")
        if not name or part not in ("means", "labels", "counts"):  # no part of prototypes
            place[last] = value
        elif part == "means":
            whole = key.removesuffix(":means")
            counts = entries.get(f"{whole}:counts")
            place[name] = Prototypes(value, entries[f"{whole}:labels"], counts)
    return tree
