"""Reads a config: YAML with `extends`, overrides `a.b=c`, validation; every problem is reported at once."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import BaseModel, ValidationError

from trivium.config.checks import CONFIG_RULES
from trivium.config.fields import paths_relative_to
from trivium.config.hints import hint, hint_for_option, section_at
from trivium.config.merging import is_mapping, merged
from trivium.config.schema import NestedError, RunConfig
from trivium.foundation.errors import ConfigError, Problem, TriviumError

_MAX_BYTES = 1 << 20
"""The largest config file."""
_MAX_VALUES = 100_000
"""The largest number of values in a config file, with its aliases written out."""
_READ_S = 10.0
"""Longest time to read a config file."""
_MAX_PROBLEMS = 100
"""Number of problems of one section that are described."""


def load_config(path: str | Path, overrides: Sequence[str] = (), without: Collection[str] = ()) -> RunConfig:
    """The config in a YAML file, with `a.b=c` overrides applied. `without` names rules that are left out."""
    with _nesting_limited(f"read the config {path}"):
        data = read_yaml(Path(path))
        for override in _kinds_first(_joined(overrides)):
            data = overlaid(data, parse_override(override))
    return config_from_mapping(data, Path(path).resolve().parent, without)


def _joined(overrides: Sequence[str]) -> Iterator[str]:
    """The overrides; an option and the value after it become one."""
    rest = list(overrides)
    while rest:
        text = rest.pop(0)
        is_option = text.startswith("-") and "=" not in text
        yield f"{text}={rest.pop(0)}" if is_option and rest and "=" not in rest[0] else text


def _kinds_first(overrides: Iterable[str]) -> list[str]:
    """The overrides in the order of their effect. A section's `kind` clears its other keys, and therefore comes before
    the overrides of that section."""
    ordered: list[tuple[str, str]] = []
    for text in overrides:
        path = text.lstrip("-").partition("=")[0] + "."
        section = path.removesuffix("kind.") if path.endswith(".kind.") else path
        start = max((i for i, (other, _) in enumerate(ordered, 1) if path.startswith(other)), default=0)
        beside = (i for i in range(start, len(ordered)) if section != path and ordered[i][0].startswith(section))
        ordered.insert(next(beside, len(ordered)), (path, text))
    return [text for _, text in ordered]


def config_from_mapping(data: Mapping[str, Any], base: Path | None = None, without: Collection[str] = ()) -> RunConfig:
    """A validated config. Raises ConfigError with every problem. Relative paths start from `base`; `without` names
    rules that are left out."""
    with paths_relative_to(base), _nesting_limited("a valid config"):
        problems = list(_unusable_values(data, ""))
        config = None
        if not problems:
            config, problems = _validate(data, without)
    if problems or config is None:
        later = "" if config is not None else " (further checks follow once these are fixed)"
        raise ConfigError("a valid config", f"{len(problems)} problem(s)", f"fix them all at once{later}:", problems)
    return config


@contextmanager
def _nesting_limited(request: str) -> Generator[None]:
    """Raises ConfigError if a config is nested more deeply than Python's recursion limit allows."""
    try:
        yield
    except RecursionError as error:
        raise ConfigError(
            request, "it is nested hundreds of levels deep", "write fewer levels; a config needs at most ten"
        ) from error


def _unusable_values(value: object, where: str) -> Iterator[Problem]:
    """Reports values that YAML can write and no file, database or array can hold, at any key."""
    if is_mapping(value):
        for key, part in value.items():
            yield from _unusable_values(part, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            yield from _unusable_values(part, f"{where}[{number}]")
    elif isinstance(value, str) and not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
        yield Problem(where, "text", f"{value[:60]!r} holds half of a surrogate pair", "write the whole character")
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        # By the logarithm of 2: Python refuses to write integers of more than 4,300 digits.
        digits = f"one of about {round(value.bit_length() * 0.30103)} digits"
        yield Problem(where, "a whole number of at most 64 bits", digits, "write a smaller one")


class _Loader(yaml.SafeLoader):
    """YAML in which a repeated key is an error, since its first value would silently have no effect, and in which
    aliases stand for at most `_MAX_VALUES` values."""

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and _num_values(node, {}) > _MAX_VALUES:
            raise yaml.constructor.ConstructorError(None, None, f"it stands for more than {_MAX_VALUES} values")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in names:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is given twice", key.start_mark
                    )
                names.add(key.value)
        return super().construct_mapping(node, deep)


def _num_values(node: yaml.Node, counts: dict[yaml.Node, int]) -> int:
    """The number of values of the node, with every alias written out."""
    if node not in counts and isinstance(node, yaml.CollectionNode):
        parts = chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value
        counts[node] = 1 + sum(_num_values(part, counts) for part in parts)
    return counts.get(node, 1)


def read_bounded(path: Path) -> str:
    """The UTF-8 text of a file of at most `_MAX_BYTES`, or of a pipe. Raises OSError for a longer one, and for a pipe
    that does not end within `_READ_S`."""
    end, data = time.monotonic() + _READ_S, bytearray()
    with open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        while (part := cast("bytes | None", file.read(_MAX_BYTES))) != b"":
            data += part or b""
            if len(data) > _MAX_BYTES:
                raise OSError(errno.EFBIG, f"it is longer than {_MAX_BYTES} bytes")
            if time.monotonic() > end:
                raise OSError(errno.ETIMEDOUT, f"its end was not reached within {_READ_S:.0f} s")
            if part is None:
                time.sleep(0.01)
    return data.decode("utf-8")


def read_yaml(path: Path, including: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A YAML mapping with its `extends` followed."""
    try:
        path = path.resolve()
        if path in including:
            raise ConfigError(f"read {path.name}", "it extends itself", "break the circle of `extends`")
        if path.suffix in (".py", ".sh"):
            do = "name a YAML file; `trivium translate` makes one of another trainer's script"
            raise ConfigError(f"read the config {path}", f"a script ({path.suffix})", do)
        loader = _Loader(read_bounded(path))
        loader.name = str(path)  # errors name it
        data: Any = loader.get_single_data()
    except FileNotFoundError as error:
        raise ConfigError(f"read the config {path}", "no such file", "check the path") from error
    except OSError as error:
        raise ConfigError(f"read the config {path}", error.strerror or str(error), "name a YAML file") from error
    except (yaml.YAMLError, ValueError) as error:  # a ValueError: no UTF-8, or an impossible number or date
        raise ConfigError(f"read the config {path}", f"not valid YAML: {error}", "correct the YAML") from error
    if not is_mapping(data):
        raise ConfigError(f"read the config {path}", "not a mapping", "start with `model:`, `tasks:`, ...")
    section = dict(data)
    parent = section.pop("extends", None)
    if parent is None:
        return section
    if not isinstance(parent, str):
        raise ConfigError(f"read the config {path}", f"extends: {parent!r}", "name one file, relative to this one")
    return overlaid(read_yaml(path.parent / parent, (*including, path)), section)


def overlaid(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """`base` overridden by a user's `change`. Raises ConfigError for a change without effect: an empty section over one
    with keys, or an index outside a list."""
    for where in _empty_sections(base, change, ""):
        raise ConfigError(
            f"{where} = {{}}",
            "an empty section changes no key of the section that it overrides",
            f"write {where}=null to remove the section, or set the keys to change",
        )
    return merged(base, change)


def _empty_sections(base: Mapping[str, Any], change: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in change.items():
        old = base.get(key)
        if is_mapping(value) and is_mapping(old):
            yield from _empty_sections(old, value, f"{prefix}{key}.") if value else [f"{prefix}{key}"] if old else []


def parse_override(text: str) -> dict[str, Any]:
    """`a.b=c` as a nested mapping; the value is read as YAML."""
    key, separator, value = text.partition("=")
    if text.startswith("-"):
        raise ConfigError(f"the option {key}", "no such option", hint_for_option(text, RunConfig))
    if not separator or not key:
        raise ConfigError(f"override {text!r}", "no `=`", "write section.field=value")
    try:
        nested: Any = yaml.load(value, _Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"override {text!r}", f"the value is not YAML: {error}", "quote it for the shell") from error
    for part in reversed(key.split(".")):
        nested = {part: nested}
    return nested


def _validate(data: Mapping[str, Any], without: Collection[str]) -> tuple[RunConfig | None, list[Problem]]:
    """The config, if it could be built, and its problems.

    Stages are validated in full before the first one starts. Their relative paths become absolute like all others.
    """
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        return None, list(flatten(error, RunConfig, ""))
    problems: list[Problem] = []
    base = config.model_dump(exclude={"stages"}, exclude_unset=True)
    resolved: list[dict[str, Any]] = []
    problems += _name_problems(config)
    for number, stage in enumerate(config.stages):
        change = {key: value for key, value in stage.items() if key != "name"}
        problems += [
            Problem(
                f"stages[{number}].{name}", f"{name!r} of one stage", "all stages share it", "set it outside `stages`"
            )
            for name in sorted({"run", "model", "stages"} & set(stage))
        ]
        try:
            staged = RunConfig.model_validate(overlaid(base, change))
        except ValidationError as error:
            problems += flatten(error, RunConfig, f"stages[{number}]")
            continue
        except ConfigError as error:
            problems.append(Problem(f"stages[{number}]", error.asked, error.found, error.do))
            continue
        problems += check(staged, f"stages[{number}].", without)
        complete = staged.model_dump(mode="json", exclude_unset=True)
        changed_values = {name: None if value is None else complete[name] for name, value in change.items()}
        resolved.append({**({"name": stage["name"]} if "name" in stage else {}), **changed_values})
    if not config.stages:
        problems += check(config, without=without)
    return config.model_copy(update={"stages": tuple(resolved)}), problems


def _name_problems(config: RunConfig) -> Iterator[Problem]:
    """Reports stages whose name is empty, no text, or that of an earlier stage."""
    names = [stage.get("name") for stage in config.stages]
    for number, name in enumerate(names):
        where = f"stages[{number}].name"
        if "name" in config.stages[number] and (not isinstance(name, str) or not name):
            yield Problem(where, "a name of the stage", repr(name), "write some text, or leave the key out")
        elif name is not None and name in names[:number]:
            yield Problem(where, f"the stage {name!r}", "an earlier one has this name", "choose another one")


def flatten(error: ValidationError, owner: type[BaseModel], prefix: str) -> Iterator[Problem]:
    """Pydantic's errors as problems, those of nested sections included, with a hint about each unknown key."""
    problems = _flattened(error, owner, prefix)
    yield from islice(problems, _MAX_PROBLEMS)
    if any(True for _ in problems):
        yield Problem(prefix, "fewer problems", f"more than {_MAX_PROBLEMS}", "correct those above first")


def _flattened(error: ValidationError, owner: type[BaseModel], prefix: str) -> Iterator[Problem]:
    """`flatten`, of any number of problems."""
    for item in error.errors(include_url=False):
        where = _dotted(prefix, item["loc"])
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, NestedError) and isinstance(cause.error, ValidationError):
            yield from flatten(cause.error, cause.owner or owner, where)
        elif isinstance(cause, NestedError) and isinstance(cause.error, TriviumError):
            yield Problem(where, cause.error.asked, cause.error.found, cause.error.do)
        elif item["type"] == "extra_forbidden":
            section = section_at(owner, item["loc"][:-1])
            fields = section.model_fields if section is not None else {}
            yield Problem(where, f"the key {item['loc'][-1]!r}", "no such key here", hint(where, item["input"], fields))
        elif item["type"] in ("model_type", "model_attributes_type", "dict_type"):
            section = section_at(owner, item["loc"])
            keys = ", ".join(section.model_fields) if section is not None else ""
            example = f"for example {where}.{keys.partition(',')[0]}; keys: {keys}" if keys else "`key: value`"
            remedy = f"set its keys, {example}"
            yield Problem(where, "a section with keys", f"{item['input']!r:.80}", remedy)
        elif item["type"] == "missing":
            yield Problem(where, "a value", "nothing", f"set {where}: ...")
        else:
            value = repr(item["input"])
            yield Problem(where, item["msg"], value if len(value) < 80 else value[:77] + "...", "correct the value")


def _dotted(prefix: str, loc: Sequence[int | str]) -> str:
    path = prefix
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path


def check(config: RunConfig, prefix: str = "", without: Collection[str] = ()) -> list[Problem]:
    """Every problem of sections that do not fit together; empty if the config can run."""
    return [problem._replace(where=prefix + problem.where) for problem in CONFIG_RULES.problems(config, without)]
