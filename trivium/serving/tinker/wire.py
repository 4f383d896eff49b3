"""The protobuf messages of the Tinker SDK: the fields that it sends and reads, by their numbers.

A message is a dict of its fields by name when it is read, and pairs of number and value when it is written.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from trivium.serving.bodies import RequestError, bad_request
from trivium.types import AnyArray

Fields = Mapping[int, tuple[str, Any]]
"""Number -> (name, kind): `int`, `double`, `text`, `bytes`, the fields of a message, or a list with one of these for a
repeated field. The SDK packs repeated numbers."""

_SPARSE: Fields = {1: ("values", "bytes"), 2: ("crow", "bytes"), 3: ("col", "bytes")}
_TENSOR: Fields = {1: ("dense", "bytes"), 2: ("sparse", _SPARSE), 3: ("dtype", "int"), 4: ("shape", "bytes")}
_CHUNK: Fields = {1: ("text", {1: ("tokens", "bytes")}), 2: ("image", "bytes"), 3: ("sound", "bytes")}
_DATUM: Fields = {1: ("chunks", [_CHUNK]), 2: ("inputs", [{1: ("key", "text"), 2: ("value", _TENSOR)}])}
_OPTION: Fields = {1: ("key", "text"), 2: ("value", {1: ("number", "double"), 2: ("text", "text")})}
FORWARD_BACKWARD: Fields = {
    1: ("model_id", "text"),
    2: ("seq_id", "int"),
    3: ("data", [_DATUM]),
    4: ("loss_fn", "text"),
    6: ("forward_only", "int"),
    7: ("options", [_OPTION]),
}
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_WIRE = {"int": _VARINT, "double": _FIXED64}
_DTYPES = {1: np.dtype("<f4"), 2: np.dtype("<i8")}
_FLOAT32 = 1


# --------------------------------------------------------------------------- reading


def read_message(data: memoryview, fields: Fields) -> dict[str, Any]:
    """The fields of a message; unknown ones are left out. Raises RequestError for bytes that are no such message."""
    message: dict[str, Any] = {}
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
        elif wire in (_FIXED64, _FIXED32, _BYTES):
            length, at = _varint(data, at) if wire == _BYTES else (8 if wire == _FIXED64 else 4, at)
            if length > len(data) - at:
                raise _damaged(f"a field of {length} bytes, of which {len(data) - at} are there")
            value, at = data[at : at + length], at + length
        else:
            raise _damaged(f"the wire type {wire}")
        if key >> 3 not in fields:
            continue
        name, kind = fields[key >> 3]
        if isinstance(kind, list):
            message.setdefault(name, []).append(_value(name, kind[0], wire, value))
        else:
            message[name] = _value(name, kind, wire, value)
    return message


def _value(name: str, kind: Any, wire: int, value: Any) -> Any:
    expected = _WIRE.get(kind, _BYTES) if isinstance(kind, str) else _BYTES
    if wire != expected:
        raise _damaged(f"{name} of wire type {wire} instead of {expected}")
    if kind == "double":
        return struct.unpack("<d", value)[0]
    if kind == "text":
        try:
            return str(value, "utf-8")
        except UnicodeDecodeError as error:
            raise _damaged(f"{name} that is no UTF-8") from error
    return value if isinstance(kind, str) else read_message(value, kind)


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """(a number of at most 64 bits, the place after it)."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise _damaged("a number that is cut")
        byte, at = data[at], at + 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise _damaged("a number of more than 64 bits")


def _damaged(found: str) -> RequestError:
    return bad_request(
        "", "a protobuf message of the SDK", found, "send it with the tinker package that the page names"
    )


def read_array(name: str, data: Any, dtype: Any) -> AnyArray:
    """The numbers in bytes. Raises RequestError for a part of a number."""
    if len(data) % np.dtype(dtype).itemsize:
        raise bad_request(name, f"{name} of {dtype}", f"{len(data)} bytes", "send whole numbers")
    return np.frombuffer(data, dtype)


def read_tensor(name: str, tensor: Mapping[str, Any], length: int, most: int) -> AnyArray:
    """A tensor as an array of shape (length,) or (length, K) with K up to `most`. A sparse one is filled up with 0.
    Raises RequestError for any other."""
    shape, at, packed = list[int](), 0, tensor.get("shape", memoryview(b""))
    while at < len(packed):
        size, at = _varint(packed, at)
        shape.append(size)
    dtype, sparse = _DTYPES.get(tensor.get("dtype", 0)), tensor.get("sparse")
    if dtype is None:
        raise bad_request(name, f"the tensor {name}", f"dtype {tensor.get('dtype', 0)}", "send float32 or int64")
    values = read_array(name, tensor.get("dense", b"") if sparse is None else sparse.get("values", b""), dtype)
    shape = shape or [len(values)]
    if shape[0] != length or len(shape) > 2 or (len(shape) == 2 and not 1 <= shape[1] <= most):
        found = f"shape {shape[:4]}, and model_input has {length} tokens"
        raise bad_request(name, f"{name} of shape [{length}], or [{length}, K] with K up to {most}", found, "fix it")
    if sparse is None and len(values) == np.prod(shape):
        return values.reshape(shape)
    rows, columns = (read_array(name, (sparse or {}).get(key, b""), "<i8") for key in ("crow", "col"))
    fits = len(shape) == 2 and len(rows) == length + 1 and rows[0] == 0 and rows[-1] == len(values) == len(columns)
    if not fits or (np.diff(rows) < 0).any() or (columns < 0).any() or (columns >= shape[1]).any():
        raise bad_request(name, f"{name} of shape {shape}", "numbers or indices that do not fit it", "fix the tensor")
    dense = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(length), np.diff(rows)), columns] = values
    return dense


# --------------------------------------------------------------------------- writing


def write_message(*fields: tuple[int, Any]) -> bytes:
    """A message of these fields: an int, a float (double), text or bytes each. None is left out."""
    parts: list[bytes] = []
    for number, value in fields:
        if isinstance(value, float):
            parts += [_written(number << 3 | _FIXED64), struct.pack("<d", value)]
        elif isinstance(value, int):
            parts += [_written(number << 3 | _VARINT), _written(value)]
        elif value is not None:
            data = value.encode() if isinstance(value, str) else value
            parts += [_written(number << 3 | _BYTES), _written(len(data)), data]
    return b"".join(parts)


def _written(value: int) -> bytes:
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def write_loss_output(metrics: Mapping[str, float], log_probs: list[AnyArray]) -> bytes:
    """`ForwardBackwardOutput`: the metrics, and the log-probabilities of each datum, (N,) or (N, K)."""
    records: list[bytes] = []
    for each in log_probs:
        parts = ((1, floats(each)), (2, np.array([0, 4 * each.size], "<i8").tobytes()), (3, _FLOAT32))
        tensor = write_message(*parts, *((4, size) for size in each.shape[1:]))
        records.append(write_message((2, write_message((1, "logprobs"), (2, tensor))), (3, 1)))
    numbers = (write_message((1, name), (2, float(value))) for name, value in metrics.items())
    return write_message((1, "ArrayRecord"), *((2, each) for each in records), *((3, each) for each in numbers))


def write_top(top: AnyArray) -> bytes:
    """`TopkLogprobs` of (N, K, 2): token ids and log-probabilities."""
    ids = top[..., 0].astype("<i4").tobytes()
    return write_message((1, ids), (2, floats(top[..., 1])), (3, top.shape[1]), (4, len(top)))


def floats(array: AnyArray) -> bytes:
    return array.astype("<f4").tobytes()
