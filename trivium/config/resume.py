"""Whether two configs mean the same run: what is saved of one, and what a resumed or a separate command may change."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from trivium.config.reading import flatten
from trivium.config.schema import BufferConfig, RunConfig, is_mapping
from trivium.errors import Problem


def to_yaml(config: RunConfig) -> str:
    """The config in full, defaults included, as it is saved in the run directory."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def fingerprint(config: RunConfig) -> str:
    """A digest of what separate commands of one run must agree on: what a resumed run may not change, and its length.

    Paths count by their last part, for they differ between machines; the address of a buffer does not count at all.
    """
    stages = [(_lasting(stage), stage.schedule.steps) for stage in config.stage_configs()]
    return hashlib.blake2b(json.dumps(stages, sort_keys=True).encode(), digest_size=8).hexdigest()


def _lasting(value: object) -> object:
    """The fields that a resumed run may not change, as JSON values."""
    if isinstance(value, BaseModel):
        fields = {
            name: getattr(value, name)
            for name, field in type(value).model_fields.items()
            if not _is_free(field) and not (isinstance(value, BufferConfig) and name == "url")
        }
        return _lasting(fields)
    if is_mapping(value):
        return {str(key): _lasting(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_lasting(part) for part in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, str) and os.path.isabs(value):
        return Path(value).name
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _is_free(field: FieldInfo) -> bool:
    return is_mapping(field.json_schema_extra) and field.json_schema_extra.get("resume") == "free"


def resume_differences(saved: Mapping[str, Any], config: RunConfig) -> list[Problem]:
    """The fields that a resumed run may not change and that differ from the saved config.

    Stages are compared one by one as the configs they stand for; the last one may also change its length.
    """
    try:
        before, now = type(config).model_validate(saved).stage_configs(), config.stage_configs()
    except ValidationError as error:  # the saved one: `config` itself is valid
        return list(flatten(error, type(config), "the saved config"))
    if len(before) != len(now):
        return [Problem("stages", f"{len(now)} stage(s)", f"the run began with {len(before)}", "start another run.dir")]
    problems: dict[Problem, None] = {}
    for number, (old, new) in enumerate(zip(before[:-1], now[:-1], strict=True)):
        if old.schedule.steps != new.schedule.steps:  # the next stage began from the last step of this one
            where = f"stages[{number}].schedule.steps"
            problems |= dict.fromkeys(_differences(old.schedule.steps, new.schedule.steps, None, where))
    for old, new in zip(before, now, strict=True):
        problems |= dict.fromkeys(_differences(old.model_dump(mode="json"), new.model_dump(mode="json"), new, ""))
    return list(problems)


def _differences(old: object, new: object, section: object, where: str) -> Iterator[Problem]:
    if isinstance(section, BaseModel) and is_mapping(old) and is_mapping(new):
        for name, field in type(section).model_fields.items():
            if _is_free(field):
                continue
            path = f"{where}.{name}" if where else name
            yield from _differences(old.get(name), new.get(name), getattr(section, name), path)
    elif is_mapping(section) and is_mapping(old) and is_mapping(new) and set(old) == set(new):
        for key, value in section.items():
            yield from _differences(old[key], new[key], value, f"{where}.{key}")
    elif old != new:
        yield Problem(where, f"{new!r}", f"the run began with {old!r}", "start another run.dir, or put the value back")
