"""Compares configs of one run: the fields that a resumed run may change, and those that separate commands share."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from trivium.config.merging import is_mapping
from trivium.config.reading import flatten
from trivium.config.saved import as_yaml
from trivium.config.schema import BufferConfig, RunConfig
from trivium.foundation.errors import Problem
from trivium.types import DAY

_Section = TypeVar("_Section", bound=BaseModel)


def to_yaml(config: RunConfig) -> str:
    """The config in full, defaults included, as it is saved in the run directory."""
    return as_yaml(config.model_dump(mode="json"))


def fingerprint(config: RunConfig) -> dict[str, str]:
    """Digests by section of the fields on which separate commands of one run must agree: those that a resumed run may
    not change, and the run's length.

    Of a path only the last part counts, since paths differ between machines. The address of a buffer does not count,
    nor do the fields that the trainer alone reads: how it updates the models, and with which loss. The day of the run
    is beside them, which explorers take from the trainer.
    """
    day = {} if config.run.date is None else {DAY: config.run.date.isoformat()}
    return day | {
        f"stages[{number}].{name}" if config.stages else name: _digest(value)
        for number, stage in enumerate(config.stage_configs())
        for name, value in _agreed(stage).items()
    }


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()


def _agreed(stage: RunConfig) -> dict[str, object]:
    """The sections of a stage that explorers and trainer both read, as JSON values. Of the algorithm, an explorer reads
    the advantage estimator, which decides whether groups need rewards or a greedy completion."""
    fields = type(stage).model_fields.items()
    values = {name: getattr(stage, name) for name, field in fields if _resume_rule(field) != "free" and name != "train"}
    estimator = getattr(stage.algorithm, "advantage", None)
    values |= {"algorithm": {"kind": stage.algorithm.kind, "advantage": estimator}}
    tasks = {f"tasks.{name}": source for name, source in values.pop("tasks").items()}
    return {name: _lasting(value) for name, value in (values | tasks).items()} | {
        "schedule.steps": stage.schedule.steps
    }


def _lasting(value: object) -> object:
    """The fields that a resumed run may not change, as JSON values."""
    if isinstance(value, BaseModel):
        fields = {
            name: getattr(value, name)
            for name, field in type(value).model_fields.items()
            if _resume_rule(field) != "free" and not (isinstance(value, BufferConfig) and name == "url")
        }
        return _lasting(fields)
    if is_mapping(value):
        return {str(key): _lasting(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_lasting(part) for part in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, str) and os.path.isabs(value):
        return Path(value).name
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _resume_rule(field: FieldInfo) -> str:
    """`free`, `change` or `same`: what a resumed run may do to a field."""
    extra = field.json_schema_extra
    return str(extra.get("resume", "same")) if is_mapping(extra) else "same"


def as_begun(saved: Mapping[str, Any], config: RunConfig) -> RunConfig:
    """The config of a resumed run: unset fields keep the values that the run chose (`chosen` of
    `trivium.config.fields.free`). Values chosen for another machine would change the run's bits."""
    return _with_choices(saved, config)


def _with_choices(saved: object, section: _Section) -> _Section:
    """`as_begun` for one section and the sections in it."""
    before = saved if is_mapping(saved) else {}
    update: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        extra, value = field.json_schema_extra, getattr(section, name)
        if isinstance(value, BaseModel):
            update[name] = _with_choices(before.get(name), value)
        elif is_mapping(extra) and "chosen" in extra and name not in section.model_fields_set:
            update[name] = before.get(name)
    changed = {name: value for name, value in update.items() if value is not getattr(section, name)}
    return section.model_copy(update=changed) if changed else section


class Difference(NamedTuple):
    """A field whose value differs between the saved and the resumed config."""

    where: str
    before: object
    now: object
    may_change: bool
    """Whether `run.change` allows it."""

    def problem(self) -> Problem:
        do = "start another run.dir, or put the value back"
        if self.may_change:
            do = "pass --change to continue with it from here on, or put the value back"
        return Problem(self.where, f"{self.now!r}", f"the run began with {self.before!r}", do)


def resume_differences(saved: Mapping[str, Any], config: RunConfig) -> list[Problem]:
    """The fields that differ from the saved config and that a resumed run may not change. A field that several stages
    have in common is one problem.

    Stages are compared one by one, each as a whole config. The last stage may also change its length.
    """
    try:
        before, now = _stages(saved, config), config.stage_configs()
    except ValidationError as error:  # the saved one: `config` itself is valid
        return list(flatten(error, type(config), "the saved config"))
    if len(before) != len(now):
        return [Problem("stages", f"{len(now)} stage(s)", f"the run began with {len(before)}", "start another run.dir")]
    problems: dict[Problem, None] = {}
    for number, (old, new) in enumerate(zip(before[:-1], now[:-1], strict=True)):
        if old.schedule.steps != new.schedule.steps:  # the next stage began from the last step of this one
            where = f"stages[{number}].schedule.steps"
            problems[Difference(where, old.schedule.steps, new.schedule.steps, False).problem()] = None
    for old, new in zip(before, now, strict=True):
        refused = [d for d in _between(old, new, "") if not (d.may_change and config.run.change)]
        problems |= dict.fromkeys(difference.problem() for difference in refused)
    return list(problems)


def resume_changes(saved: Mapping[str, Any], config: RunConfig) -> list[Difference]:
    """The fields that differ from the saved config, for a config with no `resume_differences`."""
    stages = list(zip(_stages(saved, config), config.stage_configs(), strict=True))
    return [
        difference
        for number, (old, new) in enumerate(stages)
        for difference in _between(old, new, f"stages[{number}]" if config.stages else "")
    ]


def _stages(saved: Mapping[str, Any], config: RunConfig) -> Sequence[RunConfig]:
    return type(config).model_validate(saved).stage_configs()


def _between(old: RunConfig, new: RunConfig, where: str) -> Iterator[Difference]:
    """The differences of two configs of a stage. `where` is the prefix of their paths."""
    old, new = _on_this_machine(old), _on_this_machine(new)
    return _differences(old.model_dump(mode="json"), new.model_dump(mode="json"), new, where, False)


def _on_this_machine(stage: RunConfig) -> RunConfig:
    """The stage with `auto` resolved for this machine."""
    return stage.model_copy(update={"engine": stage.engine.on_this_machine(), "train": stage.train.on_this_machine()})


def _differences(old: object, new: object, section: object, where: str, may_change: bool) -> Iterator[Difference]:
    """The differences of two JSON values below the path `where`. `section` is the value that `new` is the JSON of: its
    fields say which differences count."""
    if isinstance(section, BaseModel) and is_mapping(old) and is_mapping(new):
        for name, field in type(section).model_fields.items():
            if (rule := _resume_rule(field)) != "free":
                path = f"{where}.{name}" if where else name
                yield from _differences(old.get(name), new.get(name), getattr(section, name), path, rule == "change")
    elif is_mapping(section) and is_mapping(old) and is_mapping(new) and set(old) == set(new):
        for key, value in section.items():
            yield from _differences(old[key], new[key], value, f"{where}.{key}", may_change)
    elif _same_kinds(old, new):
        for number, value in enumerate(cast(Sequence[object], section)):
            parts = cast(Sequence[object], old)[number], cast(Sequence[object], new)[number]
            yield from _differences(*parts, value, f"{where}[{number}]", may_change)
    elif old != new:
        yield Difference(where, old, new, may_change)


def _same_kinds(old: object, new: object) -> bool:
    """Whether both are lists of plugin sections, of the same kinds in the same order."""
    if not (isinstance(old, list) and isinstance(new, list)):
        return False
    kinds = [[part.get("kind") if is_mapping(part) else None for part in parts] for parts in (old, new)]  # pyright: ignore[reportUnknownVariableType]
    return kinds[0] == kinds[1] and None not in kinds[0]
