"""Rubbish for decoders: texts, values and arrays, drawn by hypothesis."""

import numpy as np
from flwr.app import Array
from hypothesis import strategies as st

from protofl_common.wire.payloads import RAW

DIM = 3
NUMBERS = st.one_of(
    st.integers(-3, 50),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.sampled_from([10**400, True, 0.5, -0.0]),
)
TEXTS = st.one_of(
    st.text(max_size=8), st.sampled_from(["x" * 10**4, "\x1b[2J", "../..", "means", "float32"])
)
DTYPES = st.sampled_from(["<f4", "<i8", "<f2", "<f8", "<i4", "|b1", "|u1"])


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    """Any array, or one whose description does not fit its bytes."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    if draw(st.booleans()):
        values = draw(st.binary(max_size=64))
        odd = st.sampled_from(
            [(2, DIM), (-1, DIM), (10**9, DIM), (2**62, 2**62), (), (True, DIM), shape]
        )
        dtype, stype = (
            draw(st.sampled_from(["float32", "int64", "object", ""])),
            draw(st.sampled_from([RAW, "numpy"])),
        )
        return Array(dtype, draw(odd), stype, values)
    made = np.frombuffer(draw(st.binary(min_size=1, max_size=8)), np.uint8)
    values = np.resize(made, shape).astype(draw(DTYPES))
    return Array(str(values.dtype), shape, RAW, values.tobytes())


def floats(draw: st.DrawFn, shape: tuple[int, ...]) -> np.ndarray:
    """Mostly ordinary ones, sometimes with one that is not."""
    values = np.asarray(
        np.random.default_rng(draw(st.integers(0, 2**32 - 1))).normal(size=shape), np.float32
    )
    if values.size and draw(st.integers(0, 4)) == 0:
        values.flat[draw(st.integers(0, values.size - 1))] = draw(st.floats(width=32))
    return values


VALUES = st.one_of(st.integers(-(2**63), 2**63 - 1), st.floats(), st.booleans(), TEXTS, st.binary(max_size=3),
    st.lists(st.integers(-1, 9), max_size=4), st.lists(TEXTS, max_size=3),
    st.lists(st.booleans(), max_size=3))  # fmt: skip
