"""Golden fixture files: a JSON list of cases with inputs, keyword arguments and expected results."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

DATA = Path(__file__).parent / "data"
"""The cases of the functions that are built."""

_DTYPES = {"int64": torch.int64, "bool": torch.bool, "float64": torch.float64, "float32": torch.float32}
_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True)
class Case:
    """One recorded call of a reference implementation."""

    file: str
    name: str
    function: str
    kwargs: dict[str, Any]
    inputs: dict[str, Any]
    expect: dict[str, Any]
    dtypes: dict[str, str] = field(default_factory=dict)
    where: str | None = None
    rtol: float | None = None
    atol: float | None = None
    source: str = ""
    note: str = ""

    def tensors(self) -> dict[str, Any]:
        """The inputs as tensors (strings stay lists); those whose gradient is expected ask for one."""
        result = {name: _tensor(value, self.dtypes.get(name, "float32")) for name, value in self.inputs.items()}
        for key in self.expect:
            if key.startswith("grad_"):
                result[key.removeprefix("grad_")].requires_grad_(True)
        return result

    def check(self, found: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
        """Compares every expected result with what was found; `found["loss"]` is differentiated where asked for."""
        wanted = [key.removeprefix("grad_") for key in self.expect if key.startswith("grad_")]
        results = dict(found)
        if wanted:
            gradients = torch.autograd.grad(found["loss"], [inputs[name] for name in wanted])
            results |= {f"grad_{name}": gradient for name, gradient in zip(wanted, gradients, strict=True)}
        for key, expected in self.expect.items():
            assert key in results, f"nothing found for {key!r}"
            self._compare(key, results[key], expected)

    def _compare(self, key: str, found: Any, expected: Any) -> None:
        if isinstance(expected, Mapping):
            assert set(found) == set(expected), key
            for name, value in expected.items():
                self._compare(f"{key}.{name}", found[name], value)
        elif isinstance(expected, list) and len({len(row) for row in expected if isinstance(row, list)}) > 1:
            assert len(found) == len(expected), key
            for number, row in enumerate(expected):  # rows of unequal length are no array
                self._compare(f"{key}[{number}]", found[number], row)
        elif expected is None or (isinstance(expected, bool | str) and expected not in _SPECIAL):
            assert found == expected, key
        else:
            assert found is not None, f"nothing found for {key!r}"
            double = "float64" in self.dtypes.values()
            default = 1e-9 if double else 1e-6
            want = _tensor(expected, "float64")
            have = _result(found)
            if self.where is not None and want.shape == _tensor(self.inputs[self.where], "float32").shape:
                inside = _tensor(self.inputs[self.where], "float32").bool()
                want, have = want[inside], have[inside]
            rtol, atol = (default if limit is None else limit for limit in (self.rtol, self.atol))
            torch.testing.assert_close(
                have, want, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f"{self.name} {key}: {m}"
            )


def read(file: Path) -> list[Case]:
    """The cases of a fixture file."""
    return [Case(file=file.stem, **row) for row in json.loads(file.read_text(encoding="utf-8"))]


def _result(found: Any) -> torch.Tensor:
    return found.detach().double() if isinstance(found, torch.Tensor) else torch.tensor(found, dtype=torch.float64)


def _numbers(value: Any) -> Any:
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    if value is None:
        return math.nan  # a number that there is not, among others
    return _SPECIAL.get(value, value) if isinstance(value, str) else value


def _tensor(value: Any, dtype: str) -> Any:
    if dtype == "str" or (isinstance(value, str) and value not in _SPECIAL):
        return value
    return torch.tensor(_numbers(value), dtype=_DTYPES[dtype])
