"""Array types and frozen arrays: the fields of the other types are read-only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
AnyArray = npt.NDArray[Any]
Metrics = dict[str, float]
"""Metrics by name."""
Columns = Mapping[str, Any]
"""The values of a task's row by column."""


def frozen(array: npt.ArrayLike, dtype: npt.DTypeLike | None = None) -> AnyArray:
    """A read-only array of the dtype. Returns an array that is read-only already without a copy. Any other is copied,
    so that the caller cannot change it later."""
    result = np.asarray(array, dtype=dtype)
    if result.flags.writeable:
        result = result.copy()
        result.flags.writeable = False
    return result
