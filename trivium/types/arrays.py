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
Columns = Mapping[str, Any]


def frozen(array: npt.ArrayLike, dtype: npt.DTypeLike | None = None) -> AnyArray:
    """A read-only array of the dtype. Copies only arrays that the caller could still write to."""
    result = np.asarray(array, dtype=dtype)
    if result.flags.writeable:
        result = result.copy()
        result.flags.writeable = False
    return result
