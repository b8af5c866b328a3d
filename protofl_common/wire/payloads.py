"""Payloads of the algorithms, packed, checked and summed by what their rows of the catalog declare."""

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from torch import Tensor, nn

from protofl_common.maths.gaussian import ClassMoments
from protofl_common.maths.low_rank import LEFT, RIGHT, largest_rank
from protofl_common.maths.prototypes import Prototypes
from protofl_common.wire import schema
from protofl_common.wire.schema import Declared, Entry, Limits, RefusedMessage, Template

RAW = "raw-little-endian"
DTYPES: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "float64": np.dtype("<f8"), "int64": np.dtype("<i8")}
MAX_SETS = 10_000  # clients whose prototypes a message may carry
NOT_NEGATIVE = ("running_var", "num_batches_tracked")  # Of batch normalisation; a negative variance gives NaN
NORMALISATION = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)
ONE = torch.ones(())
MOST_SAMPLES, LARGEST = 2.0**20, 2.0**16
"""In a sum, the largest weight of a client or of a class, and the largest magnitude of a number; more is cut."""
StateDict = dict[str, Tensor]
Value = Prototypes | tuple[Prototypes, ...] | StateDict | Tensor
Kind = TypeVar("Kind")


class Payload:
    """Values by the names under which the catalog declares them; one that is None is left out.

    Each way to declare an entry has a method that returns it, None (of `VectorSets` ()) where it was not sent; of a
    received payload, a name that is not declared is a KeyError.
    """

    def __init__(self, **entries: Value | None) -> None:
        self.entries = {name: value for name, value in entries.items() if value is not None}
        self.declared: Declared | None = None  # of a payload that was received: what could have been sent

    def vectors(self, name: str = "prototypes") -> Prototypes | None:
        return self._get(name, Prototypes)

    def weights(self, name: str = "weights") -> StateDict | None:
        return self._get(name, dict)

    def sets(self, name: str) -> tuple[Prototypes, ...]:
        return self._get(name, tuple) or ()

    def counts(self, name: str) -> Tensor | None:
        return self._get(name, Tensor)

    def _get(self, name: str, kind: type[Kind]) -> Kind | None:
        if self.declared is not None and name not in self.declared:
            raise KeyError(f"{name} is not declared for this direction; declared: {', '.join(self.declared)}")
        value = self.entries.get(name)
        return value if isinstance(value, kind) else None


def pack_payload(payload: Payload, declared: Declared) -> RecordDict:
    """The declared entries as array records, in the order of the declaration; ValueError if one is undeclared."""
    if not isinstance(payload, Payload):
        raise TypeError(f"upload() and payload_down() return a Payload, not a {type(payload).__name__}")
    if odd := [name for name in payload.entries if name not in declared]:
        raise ValueError(f"{odd[0]} is not declared for this direction; declared: {', '.join(declared) or 'nothing'}")
    sent = {name: codec_of(name, entry, Limits()) for name, entry in declared.items() if name in payload.entries}
    return RecordDict({name: array_record(codec.pack(payload.entries[name])) for name, codec in sent.items()})


def unpack_payload(content: RecordDict, declared: Declared, limits: Limits, required: bool) -> Payload:
    """The payload of a message, RefusedMessage for what is not as declared; ``required``: every entry must be there."""
    records, payload = content.array_records, Payload()
    if odd := [name for name in records if name not in declared]:
        raise RefusedMessage(f"an undeclared array record {odd[0]!r}")
    for name, entry in declared.items():
        if name in records:
            payload.entries[name] = codec_of(name, entry, limits).unpack(records[name])
        elif required:
            raise RefusedMessage(f"no {name}")
    payload.declared = declared
    return payload


def largest_size(declared: Declared, limits: Limits) -> int:
    """How many bytes the arrays of a valid message have at most."""
    arrays = [array for name, entry in declared.items() for array in codec_of(name, entry, limits).template().values()]
    return sum(abs(math.prod(shape)) * DTYPES[dtype].itemsize for dtype, shape in arrays)


def check_size(content: RecordDict, declared: Declared, limits: Limits) -> None:
    """Refuse a message with more bytes than a valid one can have, before any of it is decoded or copied."""
    if (size := payload_bytes(content)) > (largest := largest_size(declared, limits)):
        limit = " (max-prototypes-per-class)" * any(entry.several for entry in schema.vectors_in(declared).values())
        raise RefusedMessage(f"{size} bytes of arrays, where a valid reply has at most {largest}{limit}")


def payload_bytes(content: RecordDict) -> int:
    """Bytes of all arrays in a message, as they travel, and of keys and shares."""
    values = [value for record in content.values() for value in record.values()]
    parts = [value.data if isinstance(value, Array) else value for value in values]
    return sum(len(part) for part in parts if isinstance(part, bytes))


def summary_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the records of a message, each with its bytes (of arrays, or of the text), and a digest of all of it."""
    digest, sizes = hashlib.sha256(), dict.fromkeys(sorted(content), 0)
    for name in sizes:
        for key, value in sorted(content[name].items()):
            data = value.data if isinstance(value, Array) else repr(value).encode()
            sizes[name] += len(data)
            digest.update(json.dumps([name, key, len(data)]).encode() + data)
    return {"sent": sizes, "sha256": digest.hexdigest()}


def part_of(module: nn.Module, entry: schema.Weights) -> StateDict:
    """The parameters and buffers of ``module`` that ``entry`` declares, as references."""
    out: list[str] = []
    if last := entry.without_last:
        out = [f"{name}." for name, part in module.named_modules() if any(True for _ in part.parameters(False))][-last:]
    if not entry.normalisation:
        out += [f"{name}." for name, part in module.named_modules() if isinstance(part, NORMALISATION)]
    named = {name: value for name, value in module.state_dict().items() if name.startswith(entry.parts)}
    return {name: value for name, value in named.items() if not name.startswith(tuple(out))} if out else named


def template_of(weights: StateDict) -> Template:
    return {name: (dtype_name(value), tuple(value.shape)) for name, value in weights.items()}


@dataclass(frozen=True)
class Codec(ABC):
    """How one kind of entry travels, and how secure aggregation sums it (`privacy/sums.py`)."""

    name: str
    entry: Any
    limits: Limits

    @abstractmethod
    def template(self) -> Template:
        """Array -> (dtype, shape); −n stands for up to n rows, in all arrays of the entry equally many."""

    @abstractmethod
    def pack(self, value: Any) -> StateDict:
        """The arrays of a value; ValueError for what is not declared."""

    @abstractmethod
    def checked(self, arrays: StateDict) -> Value:
        """The value of arrays of the right dtypes and shapes; RefusedMessage for impossible numbers."""

    def summed(self) -> dict[str, tuple[int, ...]]:
        """The arrays that are summed, in this order."""
        return {key: shape for key, (_, shape) in sorted(self.template().items())}

    def addends(self, value: Any, n: float) -> list[Tensor]:
        """These arrays of one client with n samples, bounded."""
        raise ValueError("sums are of what clients upload after training")

    def mean(self, sums: StateDict, n: float, clients: int) -> Value | None:
        """The entry of all clients together, from the sums; None for vectors of no class."""
        raise ValueError("sums are of what clients upload after training")

    def unpack(self, record: ArrayRecord) -> Value:
        return self.checked(self.arrays_in(record, self.template()))

    def arrays_in(self, record: ArrayRecord, template: Template) -> StateDict:
        rows = 0
        if odd := sorted(set(record) ^ set(template)):
            raise RefusedMessage(f"{self.name} whose arrays do not fit: {', '.join(odd[:3])}{' …' if odd[3:] else ''}")
        arrays = {}
        for key, (dtype, shape) in template.items():
            if shape and shape[0] < 0:
                rows = rows or rows_of(record[key], self.name, -shape[0])
                shape = (rows, *shape[1:])
            arrays[key] = decoded(record[key], f"{self.name} {key}", dtype, shape)
        return arrays

    def check_vectors(self, vectors_NW: Tensor, labels_N: Tensor, per_class: int) -> None:
        """Refuse labels out of range, vectors that are too long, and more than ``per_class`` of a class."""
        if int(labels_N.min()) < 0 or int(labels_N.max()) >= self.limits.num_classes:
            raise RefusedMessage(f"{self.name} with a label outside 0..{self.limits.num_classes - 1}")
        if (most := int(labels_N.bincount().max())) > per_class:
            limit = f"{per_class} (max-prototypes-per-class)" if per_class > 1 else "1"
            raise RefusedMessage(f"{most} {self.name} with the same label, not at most {limit}")
        if (norm := float(torch.linalg.vector_norm(vectors_NW.double(), dim=1).max())) > self.limits.max_norm:
            raise RefusedMessage(f"{self.name} of norm {norm:.3g}, above {self.limits.max_norm:g} (max-prototype-norm)")


class VectorsCodec(Codec):
    """Prototypes, of counts only declared ones; in sums a table [C, W + 1] of k · mean and k."""

    entry: schema.Vectors

    def template(self) -> Template:
        limits = self.limits
        widths = {"features": limits.feature_dim, "classes": limits.num_classes, "backbones": limits.frozen_dim}
        rows, columns = -limits.num_classes * self._per_class(), ("labels", "counts")[: 1 + self.entry.counts]
        return {"means": ("float32", (rows, widths[self.entry.width]))} | dict.fromkeys(columns, ("int64", (rows,)))

    def _per_class(self) -> int:
        return self.limits.max_per_class if self.entry.several else 1

    def pack(self, value: Prototypes) -> StateDict:
        if not self.entry.several and len(value.labels.unique()) < len(value.labels):
            raise ValueError(f"several {self.name} of a class are not declared for this direction")
        arrays = {"means": value.means, "labels": value.labels, "counts": value.counts}
        return {key: array for key in self.template() if (array := arrays[key]) is not None}

    def checked(self, arrays: StateDict) -> Prototypes:
        value, means = Prototypes(**arrays), arrays["means"]
        self.check_vectors(value.means, value.labels, self._per_class())
        if value.counts is not None and int(value.counts.min()) < 1:
            raise RefusedMessage("a count below 1")
        if self.entry.probabilities and not ((means >= 0).all() and torch.allclose(means.sum(1), ONE, atol=1e-3)):
            raise RefusedMessage(f"{self.name} that are no class probabilities")
        return value

    def summed(self) -> dict[str, tuple[int, ...]]:
        return {"table": (self.limits.num_classes, self.template()["means"][1][1] + 1)}

    def addends(self, value: Prototypes, n: float) -> list[Tensor]:
        means_PW = value.means.double().renorm(2, 0, 0.999999 * self.limits.max_norm).clamp(-LARGEST, LARGEST)
        counts_P = value.counts if self.entry.counts else None
        k_P = torch.ones(len(value)) if counts_P is None else counts_P.clamp(max=int(MOST_SAMPLES))
        table_CW = torch.zeros(self.summed()["table"], dtype=torch.float64)
        table_CW[value.labels] = k_P.double()[:, None] * torch.cat([means_PW, torch.ones(len(value), 1)], dim=1)
        return [table_CW]

    def mean(self, sums: StateDict, n: float, clients: int) -> Prototypes | None:
        sums_CW, k_C = sums["table"][:, :-1], sums["table"][:, -1]
        labels = (k_C != 0).nonzero().flatten()
        if not len(labels):
            return None
        means_PW, k_P = sums_CW[labels] / k_C[labels, None], k_C[labels]
        if bool((k_P < 1).any()):
            raise RefusedMessage(f"{self.name} of less than one sample of a class")
        if not self.entry.counts and (bool((k_P > clients).any()) or bool((k_P != k_P.round()).any())):
            raise RefusedMessage(f"{self.name} of a class from more than {clients} sites, or from a part of one")
        return Prototypes(means_PW.float(), labels, k_P.round().long() if self.entry.counts else None)


class SetsCodec(Codec):
    """The prototypes of every client, one after another."""

    def template(self) -> Template:
        rows = -self.limits.num_classes * MAX_SETS
        labels: Template = dict.fromkeys(("labels", "owners"), ("int64", (rows,)))
        return {"means": ("float32", (rows, self.limits.feature_dim)), **labels}

    def pack(self, value: tuple[Prototypes, ...]) -> StateDict:
        owners = torch.repeat_interleave(torch.tensor([len(prototypes) for prototypes in value]))
        every = Prototypes.joined(value)
        return {"means": every.means, "labels": every.labels, "owners": owners}

    def checked(self, arrays: StateDict) -> tuple[Prototypes, ...]:
        owners = arrays["owners"]
        changes = owners.diff(prepend=owners.new_full((1,), -1))
        if not bool(((changes == 0) | (changes == 1)).all()) or int(owners[-1]) >= MAX_SETS:
            raise RefusedMessage(f"{self.name} whose owners are not numbered 0, 1, 2, … in order, to {MAX_SETS - 1}")
        every = Prototypes(arrays["means"], arrays["labels"])
        sets = tuple(every.only(owners == owner) for owner in range(int(owners[-1]) + 1))
        for prototypes in sets:
            self.check_vectors(prototypes.means, prototypes.labels, per_class=1)
        return sets


class WeightsCodec(Codec):
    """A state dict; in sums n · w of every array."""

    entry: schema.Weights

    def template(self) -> Template:
        return self.limits.weights[self.name]

    def pack(self, value: StateDict) -> StateDict:
        if odd := [key for key in value if not key.startswith(self.entry.parts)]:
            parts = ", ".join(self.entry.parts)
            raise ValueError(f"{self.name}.{odd[0]} is not declared for this direction; parts: {parts}")
        return value

    def checked(self, arrays: StateDict) -> StateDict:
        if below := [key for key, value in arrays.items() if key.endswith(NOT_NEGATIVE) and (value < 0).any()]:
            raise RefusedMessage(f"{self.name} {below[0]}: below 0")
        return arrays

    def addends(self, value: StateDict, n: float) -> list[Tensor]:
        sent = [value[key].detach().cpu().double() for key in self.summed()]
        return [n * each.clamp(-LARGEST, LARGEST).where(each.isfinite(), math.nan) for each in sent]

    def mean(self, sums: StateDict, n: float, clients: int) -> StateDict:
        means = {key: (sums[key] / n, dtype) for key, (dtype, _) in self.template().items()}
        whole = {key: mean.round() if dtype == "int64" else mean for key, (mean, dtype) in means.items()}
        return {key: whole[key].to(getattr(torch, dtype)) for key, (_, dtype) in means.items()}


class UpdateCodec(WeightsCodec):
    """The change of a state dict, in which two factors may stand for a matrix."""

    def unpack(self, record: ArrayRecord) -> Value:
        whole, sent, names = self.template(), dict[str, tuple[str, tuple[int, ...]]](), set(record)
        for key, (dtype, shape) in whole.items():
            if dtype == "float32" and {key + LEFT, key + RIGHT} <= names:
                rank = rows_of(record[key + RIGHT], f"factors of {self.name} {key}", largest_rank(shape))
                sent |= {key + LEFT: (dtype, (shape[0], rank)), key + RIGHT: (dtype, (rank, math.prod(shape[1:])))}
            else:
                sent[key] = dtype, shape
        arrays = self.arrays_in(record, sent)
        for key in [key for key in whole if key not in sent]:
            arrays[key] = (arrays[key + LEFT] @ arrays[key + RIGHT]).reshape(whole[key][1])
            if not arrays[key].isfinite().all():
                raise RefusedMessage(f"{self.name} {key}: factors whose product is not finite")
        return self.checked({key: arrays[key] for key in whole})


class MomentsCodec(WeightsCodec):
    """Class moments, of which not all are those of samples."""

    def checked(self, arrays: StateDict) -> StateDict:
        moments, limits = ClassMoments.of(super().checked(arrays)), self.limits
        noise = limits.noise / max(1.0, limits.samples)
        if wrong := moments.problem_with_noise(noise, limits.longest) if noise else moments.problem():
            raise RefusedMessage(f"{self.name}: {wrong}")
        return arrays


class CountsCodec(Codec):
    """Numbers of samples of each class; in sums as they are."""

    def template(self) -> Template:
        return {"counts": ("int64", (self.limits.num_classes,))}

    def pack(self, value: Tensor) -> StateDict:
        return {"counts": value}

    def checked(self, arrays: StateDict) -> Tensor:
        if int(arrays["counts"].min()) < 0 or int(arrays["counts"].max()) < 1:
            raise RefusedMessage(f"{self.name} below 0, or all 0")
        return arrays["counts"]

    def addends(self, value: Tensor, n: float) -> list[Tensor]:
        return [value.double().clamp(max=MOST_SAMPLES)]

    def mean(self, sums: StateDict, n: float, clients: int) -> Tensor:
        return sums["counts"].round().long()


_CODECS: dict[type[Entry], type[Codec]] = {
    schema.Vectors: VectorsCodec,
    schema.VectorSets: SetsCodec,
    schema.Weights: WeightsCodec,
    schema.Update: UpdateCodec,
    schema.Moments: MomentsCodec,
    schema.Counts: CountsCodec,
}


def codec_of(name: str, entry: Entry, limits: Limits) -> Codec:
    return _CODECS[type(entry)](name, entry, limits)


def array_record(arrays: Mapping[str, Tensor]) -> ArrayRecord:
    record = ArrayRecord()
    for name, value in arrays.items():
        if (dtype := dtype_name(value)) not in DTYPES:
            raise ValueError(f"cannot send {value.dtype}; the wire carries {', '.join(DTYPES)}")
        data = value.detach().cpu().contiguous().numpy().astype(DTYPES[dtype], copy=False).tobytes()
        record[name] = Array(dtype=dtype, shape=tuple(value.shape), stype=RAW, data=data)
    return record


def decoded(array: Array, what: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
    if array.stype != RAW or array.dtype != dtype:
        raise RefusedMessage(f"{what}: {array.stype} {array.dtype} instead of {RAW} {dtype}")
    if any(type(length) is not int for length in array.shape):  # Flower hands on what stands in the sender's JSON
        raise RefusedMessage(f"{what}: a shape of other things than whole numbers")
    if tuple(array.shape) != shape:
        raise RefusedMessage(f"{what}: shape {'×'.join(map(str, array.shape))} instead of {'×'.join(map(str, shape))}")
    if len(array.data) != math.prod(shape) * DTYPES[dtype].itemsize:
        raise RefusedMessage(f"{what}: {len(array.data)} bytes do not fill the shape {tuple(array.shape)}")
    values = np.frombuffer(array.data, dtype=DTYPES[dtype]).reshape(array.shape)
    if dtype != "int64" and not np.isfinite(values).all():
        raise RefusedMessage(f"{what}: NaN or infinity")
    return torch.from_numpy(values.astype(DTYPES[dtype].newbyteorder("="), copy=True))


def rows_of(array: Array, what: str, most: int) -> int:
    """The length of an array's first axis, checked before any of it is decoded."""
    rows = array.shape[0] if array.shape else 0
    if type(rows) is not int or not 1 <= rows <= most:
        raise RefusedMessage(f"{rows!r} {what}, not from 1 to {most}")
    return rows


def dtype_name(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
