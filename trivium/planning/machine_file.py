"""Reads the description of a machine from a file, to plan a run on another machine than this one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError

from trivium.config.reading import flatten, read_yaml
from trivium.config.schema import Config
from trivium.foundation.errors import ConfigError
from trivium.planning.machine import Machine

_UNITS = {"": 1, "MB": 10**6, "GB": 10**9, "TB": 10**12, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def _bytes(value: Any) -> Any:
    """Bytes of a size such as `80 GiB` or `80GB`."""
    match = re.fullmatch(r"([0-9.]+) ?([A-Za-z]*)", value) if isinstance(value, str) else None
    if match is None:
        return value
    number, unit = match.groups()
    if unit.upper() not in _UNITS:
        raise ValueError(f"no unit {unit!r}: use MB, GB, TB, MiB, GiB or TiB")
    return int(float(number) * _UNITS[unit.upper()])


_Bytes = Annotated[int, BeforeValidator(_bytes)]


class MachineFile(Config):
    """What `trivium check --machine FILE` plans for."""

    memory: _Bytes = Field(gt=0)
    """Host memory that processes may use, in bytes or as `1 TiB`."""
    gpus: int = Field(default=0, ge=0)
    gpu_memory: _Bytes = Field(default=0, ge=0)
    """Memory of each GPU."""
    ranks: int | None = Field(default=None, ge=1)
    """Processes that torchrun starts; unset: one. On Ray, `cluster.ranks` of the config says."""


def read_machine(path: Path) -> Machine:
    """The machine that a YAML file describes. Raises ConfigError if the file is missing or has unknown keys."""
    try:
        described = MachineFile.model_validate(read_yaml(path))
    except ValidationError as error:
        problems = [*flatten(error, MachineFile, "")]
        raise ConfigError(f"the machine in {path}", f"{len(problems)} problem(s)", "correct it:", problems) from error
    if bool(described.gpus) != bool(described.gpu_memory):
        raise ConfigError(
            f"the machine in {path}",
            f"gpus {described.gpus} with gpu_memory {described.gpu_memory}",
            "give both, or neither",
        )
    return Machine(described.memory, (described.gpu_memory,) * described.gpus, described.ranks or 1)
