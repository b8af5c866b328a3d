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
    st.text(max_size=8),
    st.sampled_from(["x" * 10**4, "\x1b[2J", "../..", "means", "float32"]),
)
VALUES = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.booleans(),
    TEXTS,
    st.binary(max_size=3),
    st.lists(st.integers(-1, 9), max_size=4),
    st.lists(TEXTS, max_size=3),
    st.lists(st.booleans(), max_size=3),
)
DTYPES = st.sampled_from(["<f4", "<i8", "<f2", "<f8", "<i4", "|b1", "|u1"])
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
WRONG_SHAPES = st.sampled_from([(2, DIM), (-1, DIM), (10**9, DIM), (2**62, 2**62), (), (True, DIM)])


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    """Draw any array, or one whose dtype, shape and encoding need not fit its bytes."""
    fits = draw(st.booleans())
    if fits:  # a few random bytes, repeated until the shape is full
        numbers = np.frombuffer(draw(st.binary(min_size=1, max_size=8)), np.uint8)
        values = np.resize(numbers, draw(SHAPES)).astype(draw(DTYPES))
        return Array(str(values.dtype), values.shape, RAW, values.tobytes())

    dtype = draw(st.sampled_from(["float32", "int64", "object", ""]))
    shape = draw(st.one_of(WRONG_SHAPES, SHAPES))
    stype = draw(st.sampled_from([RAW, "numpy"]))
    return Array(dtype, shape, stype, draw(st.binary(max_size=64)))


def floats(draw: st.DrawFn, shape: tuple[int, ...]) -> np.ndarray:
    """Draw normal float32 numbers; in one array of five, one may be NaN, infinite or huge."""
    seed = draw(st.integers(0, 2**32 - 1))
    values = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    spoil_one = values.size and draw(st.integers(0, 4)) == 0
    if spoil_one:
        place = draw(st.integers(0, values.size - 1))
        values.flat[place] = draw(st.floats(width=32))
    return values
