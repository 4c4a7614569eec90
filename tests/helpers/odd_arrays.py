"""Arrays and integers that Python may hand to the extension, sound or not."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes

__all__ = ["REFUSALS", "integers", "misaligned", "odd_arrays"]

REFUSALS: Final = (ValueError, TypeError)
"""How the extension refuses; TypeError: no array at all, or one that numpy does not give away."""

DTYPES: Final = (
    *("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "complex64", "bool", ">i4", "O", "M8[s]", "S4"),
)

integers = st.one_of(
    st.integers(-3, 3),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from(
        [sign * 2**power + off for power in (4, 31, 32, 63) for sign in (-1, 1) for off in (-1, 0)]
    ).filter(lambda value: -(2**63) <= value < 2**63),
)


@st.composite
def odd_arrays(draw: st.DrawFn, dtypes: tuple[str, ...] = DTYPES) -> npt.NDArray[Any]:
    """Arrays of any type, shape and layout in memory."""
    shape = draw(array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=24))
    dtype = np.dtype(draw(st.sampled_from(dtypes)))
    array = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    laid: npt.NDArray[Any] = draw(st.sampled_from(LAYOUTS))(array)
    return laid


def misaligned(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.dtype == object or array.size == 0:
        return array
    raw = np.frombuffer(b"\0" + array.tobytes(), array.dtype, offset=1)
    return raw.reshape(array.shape)


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False
    return array


def field_of_records(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Give it strides that are no multiple of its items."""
    if array.dtype == object:
        return array
    records = np.zeros(array.shape, [("value", array.dtype), ("other", "u1")])
    records["value"] = array
    field: npt.NDArray[Any] = records["value"]
    return field


LAYOUTS: Final = (
    lambda array: array,
    lambda array: array.T,
    lambda array: array[..., ::-1] if array.ndim else array,
    lambda array: np.repeat(array, 2, axis=-1)[..., ::2] if array.ndim else array,
    lambda array: np.broadcast_to(array, (3, *array.shape)),
    lambda array: np.asfortranarray(array),
    misaligned,
    read_only,
    field_of_records,
)
