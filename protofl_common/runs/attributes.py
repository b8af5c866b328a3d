"""From named attributes of an algorithm's half to the tensors of a checkpoint, and back; the same for both halves.

An attribute may be a tensor or parameter, prototypes, a module, an optimizer, a random generator, None, or a dictionary
of these by name, of any depth. Entries are named ``seen_C``, ``model/body.0.weight``, ``sets/site-1``, those of an
optimizer ``sgd/0.momentum_buffer``, by parameter; prototypes take entries with ``:means``, ``:labels`` and, where they
have any, ``:counts`` after the name.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from protofl_common.maths.prototypes import Prototypes

_MEANS, _LABELS, _COUNTS = ":means", ":labels", ":counts"
_IN_PLACE = (torch.Generator, torch.optim.Optimizer, nn.Module, dict)


def pack_attributes(owner: object, names: Iterable[str]) -> dict[str, Tensor]:
    """The named attributes as tensors of their own, on the CPU."""
    return {key: value.cpu().clone() for key, value in tensors_of(owner, names).items()}


def tensors_of(owner: object, names: Iterable[str]) -> dict[str, Tensor]:
    """The tensors of the named attributes themselves, for one who looks at them at once: nothing is copied."""
    return {key: value.detach() for name in names for key, value in _entries(name, getattr(owner, name)).items()}


def restore_attributes(owner: object, names: Iterable[str], entries: Mapping[str, Tensor]) -> None:
    """Set the attributes of a freshly built ``owner`` to what `pack_attributes` gave."""
    for name in names:
        value = getattr(owner, name)
        if (restored := _restored(value, name, entries)) is not value:
            setattr(owner, name, restored)


def _restored(value: Any, name: str, entries: Mapping[str, Tensor]) -> Any:
    """Restore in place where possible: an optimizer may hold a reference."""
    inner = {key.removeprefix(f"{name}/"): tensor for key, tensor in entries.items() if key.startswith(f"{name}/")}
    match value:
        case torch.Generator():
            value.set_state(entries[name].cpu())
        case torch.optim.Optimizer():
            state: dict[int, dict[str, Tensor]] = {}
            for key, tensor in inner.items():
                index, _, part = key.partition(".")
                state.setdefault(int(index), {})[part] = tensor
            value.load_state_dict({"state": state, "param_groups": value.state_dict()["param_groups"]})
        case nn.Module():
            value.load_state_dict(inner)
        case Tensor():
            value.data.copy_(entries[name])
        case dict():
            lasting = {key: each for key, each in value.items() if isinstance(each, _IN_PLACE)}
            new = _tree(inner) | {key: _restored(each, key, inner) for key, each in lasting.items()}
            return {key: new[key] for key in (value | new) if key in new}  # files sort, and sums go by the order
        case _:
            plain = {key: entries[key] for part in ("", _MEANS, _LABELS, _COUNTS) if (key := name + part) in entries}
            return _tree(inner) if inner else _tree(plain).get(name)
    return value


def _entries(name: str, value: Any) -> dict[str, Tensor]:
    match value:
        case None:
            return {}
        case Prototypes():
            counts = {} if value.counts is None else {name + _COUNTS: value.counts}
            return {name + _MEANS: value.means, name + _LABELS: value.labels, **counts}
        case Tensor():
            return {name: value}
        case torch.Generator():
            return {name: value.get_state()}
        case torch.optim.Optimizer():
            of_parameter = value.state_dict()["state"].items()
            parts = {f"{index}.{part}": tensor for index, state in of_parameter for part, tensor in state.items()}
            inner: Mapping[str, Any] = {part: torch.as_tensor(each) for part, each in parts.items() if each is not None}
        case nn.Module():
            inner = value.state_dict()
        case dict():
            inner = value
        case _:
            raise TypeError(f"{name}: a checkpoint cannot hold a {type(value).__name__}")
    return {key: tensor for part, inside in inner.items() for key, tensor in _entries(f"{name}/{part}", inside).items()}


def _tree(entries: Mapping[str, Tensor]) -> dict[str, Any]:
    """Tensors by name, prototypes where there are means and labels of a name, dictionaries where it has a slash."""
    tree: dict[str, Any] = {}
    for key, value in entries.items():
        *path, last = key.split("/")
        place = tree
        for name in path:
            place = place.setdefault(name, {})
        if last.endswith(_MEANS):
            whole = key.removesuffix(_MEANS)
            place[last.removesuffix(_MEANS)] = Prototypes(value, entries[whole + _LABELS], entries.get(whole + _COUNTS))
        elif not last.endswith((_LABELS, _COUNTS)):
            place[last] = value
    return tree
