"""Payloads of the algorithms, packed, checked and summed by what their rows of the catalog declare.

Each kind of entry has two classes, a `schema.Entry` that declares it and a `Codec` here that packs
it, so that the catalog, which every command reads, does not import PyTorch.
"""

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
from protofl_common.wire.schema import (
    ArrayType,
    Declared,
    Entry,
    Limits,
    RefusedMessage,
    Template,
)

RAW = "raw-little-endian"
DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
    "int64": np.dtype("<i8"),
}
MAX_SETS = 10_000  # clients whose prototypes a message may carry
# Of batch normalisation; a negative variance gives NaN.
NOT_NEGATIVE = ("running_var", "num_batches_tracked")
NORMALISATION = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)
ONE = torch.ones(())
MAX_WEIGHT = 2.0**20  # in a sum, the largest weight of a client or of a class; more is cut
MAX_ADDEND = 2.0**16  # in a sum, the largest magnitude of a number

StateDict = dict[str, Tensor]
Value = Prototypes | tuple[Prototypes, ...] | StateDict | Tensor
Kind = TypeVar("Kind")


class Payload:
    """Values by the names under which the catalog declares them; one that is None is left out.

    `vectors`, `weights`, `sets` and `counts` return the entry of a name: None, or () for `sets`, if
    it was not sent. They raise KeyError if the payload was received and the name is not declared.
    """

    def __init__(self, **entries: Value | None) -> None:
        self.entries = {name: value for name, value in entries.items() if value is not None}
        self.declared: Declared | None = None  # of a received payload: what could have been sent

    def vectors(self, name: str = "prototypes") -> Prototypes | None:
        return self._get(name, Prototypes)

    def weights(self, name: str = "weights") -> StateDict | None:
        return self._get(name, dict)

    def sets(self, name: str) -> tuple[Prototypes, ...]:
        return self._get(name, tuple) or ()

    def counts(self, name: str) -> Tensor | None:
        return self._get(name, Tensor)

    def _get(self, name: str, kind: type[Kind]) -> Kind | None:
        """Return the value of an entry; None where it was not sent, or is of another kind."""
        if self.declared is not None and name not in self.declared:
            known = ", ".join(self.declared)
            raise KeyError(f"{name} is not declared for this direction; declared: {known}")
        value = self.entries.get(name)
        return value if isinstance(value, kind) else None


def pack_payload(payload: Payload, declared: Declared) -> RecordDict:
    """Pack a payload as one array record for each entry, in the order of the declaration.

    A declared entry without a value is left out. ValueError for a value that is not declared,
    TypeError for anything else than a payload, which an algorithm of a user may return.
    """
    if not isinstance(payload, Payload):
        kind = type(payload).__name__
        raise TypeError(f"upload() and payload_down() return a Payload, not a {kind}")
    for name in payload.entries:
        if name not in declared:
            known = ", ".join(declared) or "nothing"
            raise ValueError(f"{name} is not declared for this direction; declared: {known}")

    content = RecordDict()
    for name, entry in declared.items():
        if name in payload.entries:
            codec = codec_of(name, entry, Limits())  # limits are for receivers
            content[name] = array_record(codec.pack(payload.entries[name]))
    return content


def unpack_payload(
    content: RecordDict, declared: Declared, limits: Limits, required: bool
) -> Payload:
    """Unpack the payload of a message; RefusedMessage for all that is not as declared.

    With ``required`` every declared entry must be there: clients send all, servers may leave out.
    """
    records = content.array_records
    for name in records:
        if name not in declared:
            raise RefusedMessage(f"an undeclared array record {name!r}")

    payload = Payload()
    for name, entry in declared.items():
        if name in records:
            codec = codec_of(name, entry, limits)
            payload.entries[name] = codec.unpack(records[name])
        elif required:
            raise RefusedMessage(f"no {name}")
    payload.declared = declared
    return payload


def largest_size(declared: Declared, limits: Limits) -> int:
    """Return how many bytes the declared arrays of a message may have at most."""
    size = 0
    for name, entry in declared.items():
        template = codec_of(name, entry, limits).template()
        for dtype, shape in template.values():
            numbers = abs(math.prod(shape))  # a first axis of −n stands for up to n rows
            size += numbers * DTYPES[dtype].itemsize
    return size


def check_size(content: RecordDict, declared: Declared, limits: Limits) -> None:
    """Refuse a message with more bytes than a valid one can have, before any of it is decoded."""
    size = payload_bytes(content)
    largest = largest_size(declared, limits)
    if size <= largest:
        return
    setting = ""  # the one that would allow more bytes
    if any(entry.several for entry in schema.vectors_in(declared).values()):
        setting = " (max-prototypes-per-class)"
    raise RefusedMessage(
        f"{size} bytes of arrays, where a valid reply has at most {largest}{setting}"
    )


def payload_bytes(content: RecordDict) -> int:
    """Count the bytes of all arrays in a message, as they travel, and of all values of bytes.

    Such values are the keys and shares of secure aggregation, and envelopes.
    """
    size = 0
    for record in content.values():
        for value in record.values():
            data = value.data if isinstance(value, Array) else value
            if isinstance(data, bytes):
                size += len(data)
    return size


def declared_part(module: nn.Module, entry: schema.Weights) -> StateDict:
    """Return the parameters and buffers of ``module`` that ``entry`` declares, as references."""
    undeclared_prefixes: list[str] = []  # of the names of tensors
    if entry.without_last:
        layers_with_weights = []
        for name, layer in module.named_modules():
            if list(layer.parameters(recurse=False)):  # its own, not those of layers inside it
                layers_with_weights.append(f"{name}.")
        undeclared_prefixes = layers_with_weights[-entry.without_last :]
    if not entry.normalisation:
        for name, layer in module.named_modules():
            if isinstance(layer, NORMALISATION):
                undeclared_prefixes.append(f"{name}.")

    declared: StateDict = {}
    for name, value in module.state_dict().items():
        if name.startswith(entry.parts) and not name.startswith(tuple(undeclared_prefixes)):
            declared[name] = value
    return declared


def template_of(weights: StateDict) -> Template:
    """Return type and shape of each tensor, by its name."""
    return {name: (dtype_name(value), tuple(value.shape)) for name, value in weights.items()}


@dataclass(frozen=True)
class Codec(ABC):
    """How one kind of entry travels, and how secure aggregation sums it (`privacy/sums.py`)."""

    name: str
    entry: Any
    limits: Limits

    @abstractmethod
    def template(self) -> Template:
        """Return the arrays that travel: name -> (dtype, shape).

        Where the sender chooses the number of rows, the first axis of a shape is negative: −n means
        from 1 to n rows, but equally many in all arrays of the entry (`arrays_in`).
        """

    @abstractmethod
    def pack(self, value: Any) -> StateDict:
        """Return the arrays of a value; ValueError for what is not declared."""

    @abstractmethod
    def checked(self, arrays: StateDict) -> Value:
        """Make the value of its arrays, after a check of the numbers in them.

        Their dtypes and shapes were checked before (`arrays_in`). RefusedMessage for numbers that
        no honest sender can have.
        """

    def summed(self) -> dict[str, tuple[int, ...]]:
        """Return the arrays that are summed, in this order, with their shapes."""
        return {key: shape for key, (_, shape) in sorted(self.template().items())}

    def addends(self, value: Any, n: float) -> list[Tensor]:
        """Return the arrays of `summed` as a client with n training samples adds them to a sum.

        Each number is cut to its bounds first: the server sees the sum alone, and cannot check the
        numbers of single clients.
        """
        raise ValueError("sums are of what clients upload after training")

    def mean(self, sums: StateDict, n: float, clients: int) -> Value | None:
        """Return the mean over all clients, from sums over them; None if no class has a vector.

        The clients have n training samples together.
        """
        raise ValueError("sums are of what clients upload after training")

    def unpack(self, record: ArrayRecord) -> Value:
        return self.checked(self.arrays_in(record, self.template()))

    def arrays_in(self, record: ArrayRecord, template: Template) -> StateDict:
        """Decode the arrays of a record; RefusedMessage where they do not fit the ``template``.

        `template` says what a negative first axis means.
        """
        misfits = sorted(set(record) ^ set(template))  # names that are missing or not expected
        if misfits:
            names = ", ".join(misfits[:3])
            more = " …" if misfits[3:] else ""
            raise RefusedMessage(f"{self.name} whose arrays do not fit: {names}{more}")

        rows = 0
        arrays = {}
        for key, (dtype, shape) in template.items():
            if shape and shape[0] < 0:
                # the first array says how many rows there are, and all others must have as many
                rows = rows or count_rows(record[key], self.name, -shape[0])
                shape = (rows, *shape[1:])
            arrays[key] = decoded(record[key], f"{self.name} {key}", dtype, shape)
        return arrays

    def check_vectors(self, vectors_NW: Tensor, labels_N: Tensor, per_class: int) -> None:
        """Refuse unknown labels, more than ``per_class`` vectors of a class, and too long vectors.

        ``vectors_NW`` are N ≥ 1 vectors of W numbers each.
        """
        classes = self.limits.num_classes
        if int(labels_N.min()) < 0 or int(labels_N.max()) >= classes:
            raise RefusedMessage(f"{self.name} with a label outside 0..{classes - 1}")

        most_of_a_class = int(labels_N.bincount().max())
        if most_of_a_class > per_class:
            limit = f"{per_class} (max-prototypes-per-class)" if per_class > 1 else "1"
            raise RefusedMessage(
                f"{most_of_a_class} {self.name} with the same label, not at most {limit}"
            )

        norms_N = torch.linalg.vector_norm(vectors_NW.double(), dim=1)
        largest_norm = float(norms_N.max())
        if largest_norm > self.limits.max_norm:
            raise RefusedMessage(
                f"{self.name} of norm {largest_norm:.3g}, above {self.limits.max_norm:g} "
                "(max-prototype-norm)"
            )


class VectorsCodec(Codec):
    """Prototypes [P, W], with counts of samples if these are declared.

    In a sum a client's prototypes are a table [C, W + 1]: a class's row is k · mean, and then k.
    """

    entry: schema.Vectors

    def template(self) -> Template:
        # negative: from one row to so many, as the sender chooses (`Codec.template`)
        rows = -self.limits.num_classes * self._per_class()
        template: dict[str, ArrayType] = {
            "means": ("float32", (rows, self._width())),
            "labels": ("int64", (rows,)),
        }
        if self.entry.counts:
            template["counts"] = ("int64", (rows,))
        return template

    def _width(self) -> int:
        """Return W, how many numbers a vector has, by what the entry declares."""
        if self.entry.width == "features":
            return self.limits.feature_dim
        if self.entry.width == "classes":
            return self.limits.num_classes
        return self.limits.frozen_dim

    def _per_class(self) -> int:
        return self.limits.max_per_class if self.entry.several else 1

    def pack(self, value: Prototypes) -> StateDict:
        """Return means, labels and, if declared, counts.

        ValueError if a class has several vectors where one is declared.
        """
        if not self.entry.several and len(value.labels.unique()) < len(value.labels):
            raise ValueError(f"several {self.name} of a class are not declared for this direction")
        arrays = {"means": value.means, "labels": value.labels}
        # a client's prototypes always have counts, for protections; undeclared ones are not sent
        if self.entry.counts and value.counts is not None:
            arrays["counts"] = value.counts
        return arrays

    def checked(self, arrays: StateDict) -> Prototypes:
        """Make prototypes of arrays; RefusedMessage if labels, counts, norms or sums are wrong."""
        value = Prototypes(**arrays)
        means = value.means
        self.check_vectors(means, value.labels, self._per_class())
        if value.counts is not None and int(value.counts.min()) < 1:
            raise RefusedMessage(f"{self.name} with a count of samples below 1")
        if self.entry.probabilities:
            none_negative = bool((means >= 0).all())
            # the sum of many float32 numbers is 1 only up to rounding
            if not none_negative or not torch.allclose(means.sum(1), ONE, atol=1e-3):
                raise RefusedMessage(f"{self.name} that are not class probabilities")
        return value

    def summed(self) -> dict[str, tuple[int, ...]]:
        return {"table": (self.limits.num_classes, self._width() + 1)}

    def addends(self, value: Prototypes, n: float) -> list[Tensor]:
        """Return one table [C, W + 1]: for each class k · mean, and k, zeros for an absent class.

        k is the number of the class's samples where counts are declared, else 1. As every class has
        this weight of its own, the client's number of samples n does not matter.
        """
        # a little below the limit: rounding in the sum must not bring the mean above it
        longest = 0.999999 * self.limits.max_norm
        means_PW = value.means.double().renorm(p=2, dim=0, maxnorm=longest)
        # the norm's limit may be larger than a number in a sum may be; k has a limit of its own
        means_PW = means_PW.clamp(-MAX_ADDEND, MAX_ADDEND)
        if self.entry.counts and value.counts is not None:
            k_P = value.counts.clamp(max=int(MAX_WEIGHT)).double()
        else:
            k_P = torch.ones(len(value)).double()
        mean_and_1 = torch.cat([means_PW, torch.ones(len(value), 1)], dim=1)  # [P, W + 1]
        table = torch.zeros(self.summed()["table"], dtype=torch.float64)
        table[value.labels] = k_P[:, None] * mean_and_1
        return [table]

    def mean(self, sums: StateDict, n: float, clients: int) -> Prototypes | None:
        """Return Σ k · mean / Σ k of each class that a client has; n does not matter.

        The sums are over clients, and k is that of `addends`. RefusedMessage for a Σ k that so many
        ``clients`` cannot have.
        """
        sums_CW = sums["table"][:, :-1]
        k_C = sums["table"][:, -1]  # Σ k
        labels = (k_C != 0).nonzero().flatten()
        if not len(labels):
            return None

        k_P = k_C[labels]
        means_PW = sums_CW[labels] / k_P[:, None]
        if bool((k_P < 1).any()):
            raise RefusedMessage(f"{self.name} of less than one sample of a class")
        if self.entry.counts:
            return Prototypes(means_PW.float(), labels, k_P.round().long())
        # without counts a client's k is 1, so Σ k is the number of clients with the class
        if bool((k_P > clients).any()) or bool((k_P != k_P.round()).any()):
            raise RefusedMessage(
                f"{self.name} of a class from more than {clients} sites, or from a part of one"
            )
        return Prototypes(means_PW.float(), labels)


class SetsCodec(Codec):
    """The prototypes of every client, one after another."""

    def template(self) -> Template:
        # negative: from one row to so many, as the sender chooses (`Codec.template`)
        rows = -self.limits.num_classes * MAX_SETS
        return {
            "means": ("float32", (rows, self.limits.feature_dim)),
            "labels": ("int64", (rows,)),
            "owners": ("int64", (rows,)),
        }

    def pack(self, value: tuple[Prototypes, ...]) -> StateDict:
        """Return the prototypes of all clients, and for each the number of its client from 0 on."""
        sizes = torch.tensor([len(prototypes) for prototypes in value])
        joined = Prototypes.joined(value)
        return {
            "means": joined.means,
            "labels": joined.labels,
            "owners": torch.repeat_interleave(sizes),  # of the sizes 2 and 1: 0, 0, 1
        }

    def checked(self, arrays: StateDict) -> tuple[Prototypes, ...]:
        """Part the arrays by client; RefusedMessage unless each owner has valid prototypes."""
        owners = arrays["owners"]
        before_first = owners.new_full((1,), -1)  # so that the first step, to owner 0, is 1
        steps = owners.diff(prepend=before_first)
        in_order = bool(((steps == 0) | (steps == 1)).all())
        if not in_order or int(owners[-1]) >= MAX_SETS:
            raise RefusedMessage(
                f"{self.name} whose owners are not numbered 0, 1, 2, … in order, to {MAX_SETS - 1}"
            )

        joined = Prototypes(arrays["means"], arrays["labels"])
        sets = tuple(joined.only(owners == owner) for owner in range(int(owners[-1]) + 1))
        for prototypes in sets:
            self.check_vectors(prototypes.means, prototypes.labels, per_class=1)
        return sets


class WeightsCodec(Codec):
    """A state dict; in sums n · w of every array."""

    entry: schema.Weights

    def template(self) -> Template:
        return self.limits.weights[self.name]

    def pack(self, value: StateDict) -> StateDict:
        """Return the tensors as they are; ValueError for one of a part that is not declared."""
        for key in value:
            if not key.startswith(self.entry.parts):
                parts = ", ".join(self.entry.parts)
                raise ValueError(
                    f"{self.name}.{key} is not declared for this direction; parts: {parts}"
                )
        return value

    def checked(self, arrays: StateDict) -> StateDict:
        for key, value in arrays.items():
            if key.endswith(NOT_NEGATIVE) and (value < 0).any():
                raise RefusedMessage(f"{self.name} {key}: below 0")
        return arrays

    def addends(self, value: StateDict, n: float) -> list[Tensor]:
        """Return n · w of every array w, with NaN for each number that is too large to sum."""
        addends = []
        for key in self.summed():
            w = value[key].detach().cpu().double()
            # A number that is cut to the bound is one that the server knows: taken from the sum, it
            # would show what the other sites sent. NaN makes this client withhold its vector
            # (`sums.NotFinite`)
            w = w.where(w.abs() <= MAX_ADDEND, math.nan)
            addends.append(n * w)
        return addends

    def mean(self, sums: StateDict, n: float, clients: int) -> StateDict:
        """Return the mean over n samples, in the types of the arrays; whole numbers are rounded."""
        means = {}
        for key, (dtype, _) in self.template().items():
            mean = sums[key] / n
            if dtype == "int64":
                mean = mean.round()
            means[key] = mean.to(getattr(torch, dtype))
        return means


class UpdateCodec(WeightsCodec):
    """The change of a state dict, in which two factors may stand for a matrix."""

    def unpack(self, record: ArrayRecord) -> Value:
        """Decode a change, and multiply the factors; RefusedMessage for all that does not fit."""
        whole = self.template()
        sent: dict[str, ArrayType] = {}  # as `whole`, but for the factors in the place of matrices
        for key, (dtype, shape) in whole.items():
            left = key + LEFT
            right = key + RIGHT
            if dtype == "float32" and left in record and right in record:
                # the matrix [rows, columns] is left [rows, rank] times right [rank, columns]
                what = f"factors of {self.name} {key}"
                rank = count_rows(record[right], what, largest_rank(shape))
                sent[left] = (dtype, (shape[0], rank))
                sent[right] = (dtype, (rank, math.prod(shape[1:])))
            else:
                sent[key] = (dtype, shape)

        decoded_arrays = self.arrays_in(record, sent)
        arrays = {}
        for key, (_, shape) in whole.items():
            if key in sent:
                arrays[key] = decoded_arrays[key]
                continue
            product = decoded_arrays[key + LEFT] @ decoded_arrays[key + RIGHT]
            if not product.isfinite().all():
                raise RefusedMessage(f"{self.name} {key}: factors whose product is not finite")
            arrays[key] = product.reshape(shape)
        return self.checked(arrays)


class MomentsCodec(WeightsCodec):
    """Class moments: tensors that are refused where no samples can have such moments."""

    def checked(self, arrays: StateDict) -> StateDict:
        """Return the arrays unchanged; RefusedMessage if no set of samples has such moments.

        Where clients add noise for differential privacy, moments that are impossible only because
        of this noise are accepted.
        """
        moments = ClassMoments.of(super().checked(arrays))
        # `moment_noise` limits the noise of a sum over all samples of the upload, whose number is
        # `limits.samples`; moments are this sum divided by that number
        noise = self.limits.moment_noise / max(1.0, self.limits.samples)
        if noise:
            problem = moments.why_impossible_with_noise(noise, self.limits.max_feature_norm)
        else:
            problem = moments.why_impossible(self.limits.classes_of_a_sample)
        if problem:
            raise RefusedMessage(f"{self.name}: {problem}")
        return arrays


class CountsCodec(Codec):
    """Numbers of samples of each class, which are summed as they are."""

    def template(self) -> Template:
        return {"counts": ("int64", (self.limits.num_classes,))}

    def pack(self, value: Tensor) -> StateDict:
        return {"counts": value}

    def checked(self, arrays: StateDict) -> Tensor:
        counts = arrays["counts"]
        if int(counts.min()) < 0 or int(counts.max()) < 1:
            raise RefusedMessage(f"{self.name}: a number of samples is below 0, or all are 0")
        return counts

    def addends(self, value: Tensor, n: float) -> list[Tensor]:
        return [value.double().clamp(max=MAX_WEIGHT)]

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
    """Return what packs, checks and sums the entry ``name`` within a receiver's ``limits``."""
    return _CODECS[type(entry)](name, entry, limits)


def array_record(arrays: Mapping[str, Tensor]) -> ArrayRecord:
    """Encode tensors as raw little-endian bytes; ValueError for a dtype not of `DTYPES`."""
    record = ArrayRecord()
    for name, value in arrays.items():
        dtype = dtype_name(value)
        if dtype not in DTYPES:
            raise ValueError(f"cannot send {value.dtype}; the wire carries {', '.join(DTYPES)}")
        values = value.detach().cpu().contiguous().numpy()
        data = values.astype(DTYPES[dtype], copy=False).tobytes()
        record[name] = Array(dtype=dtype, shape=tuple(value.shape), stype=RAW, data=data)
    return record


def decoded(array: Array, what: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Decode an array of this dtype and shape; RefusedMessage, about ``what``, for any other.

    Shape and number of bytes are checked before the bytes are read. Floats must be finite.
    """
    if array.stype != RAW or array.dtype != dtype:
        raise RefusedMessage(f"{what}: {array.stype} {array.dtype} instead of {RAW} {dtype}")
    # Flower hands on the sizes that stand in the sender's JSON, of any type
    if any(type(length) is not int for length in array.shape):
        raise RefusedMessage(f"{what}: its shape is {array.shape!r}, not whole numbers")
    if tuple(array.shape) != shape:
        sent = "×".join(map(str, array.shape))
        wanted = "×".join(map(str, shape))
        raise RefusedMessage(f"{what}: shape {sent} instead of {wanted}")
    size = len(array.data)
    if size != math.prod(shape) * DTYPES[dtype].itemsize:
        raise RefusedMessage(f"{what}: {size} bytes do not fill the shape {tuple(array.shape)}")

    values = np.frombuffer(array.data, dtype=DTYPES[dtype]).reshape(array.shape)
    if dtype != "int64" and not np.isfinite(values).all():
        raise RefusedMessage(f"{what}: NaN or infinity")
    native = DTYPES[dtype].newbyteorder("=")  # this machine's byte order
    return torch.from_numpy(values.astype(native, copy=True))


def count_rows(array: Array, what: str, most: int) -> int:
    """Return the length of an array's first axis, before any of it is decoded.

    RefusedMessage, about ``what``, unless it is from 1 to ``most``.
    """
    rows = array.shape[0] if array.shape else 0
    if type(rows) is not int or not 1 <= rows <= most:
        raise RefusedMessage(f"{what}: {rows!r} rows, not from 1 to {most}")
    return rows


def dtype_name(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
