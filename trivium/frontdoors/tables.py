"""Config tables of the front doors: how each key of another trainer's config is translated.

A table lists every accepted key. Unknown keys and unsupported values are errors.
Keys that are switched off or have no effect are accepted. All problems are reported at once.

A front door translates in three steps:

    settings = TABLE.read(config)                 # values by dotted key, and the problems
    mapping = settings.mapped(device="cpu")       # the RunConfig fragment of every `Mapped` row with a path
    ...                                           # rules that need several keys

A `Mapped` row names the RunConfig path that it sets, a converter and a condition, and the pages of the documentation
describe it from these. A row whose `to` is prose sets nothing: it describes a key that a rule of the front door reads.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trivium.config import RunConfig, merged
from trivium.foundation.errors import ConfigError, Problem
from trivium.frontdoors.plain_values import is_missing, plain, resolved, unescaped, unresolved

_log = logging.getLogger("trivium")
_announced: set[str] = set()


KEEP_ALL = 1_000_000
"""The checkpoint.keep of originals that keep every checkpoint by default; the core's default is a small number."""
_NONE = "None"
"""How a command line may write null: Hydra reads it as text, and the original takes it for null."""
_PATH = re.compile(r"[a-z]\w*(\.\w+)+")
"""Matches the path of a RunConfig field."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """A key that is translated to a RunConfig key."""

    to: str | tuple[str, ...]
    """The path of the RunConfig field that it sets (`train.optimizer.lr`), or several. Text that is no path describes
    what a rule of the front door sets."""
    default: Any = None
    """The original's default. Values must have the same type. An unset key without a default sets nothing."""
    type: type | None = None
    """The type of the values, unless the default determines it. `Path` accepts one path or a list, and expands `~`."""
    convert: Callable[[Any], Any] | Mapping[Any, Any] | None = None
    """Returns the value of the RunConfig field. None sets nothing, and so does a value that a mapping lacks."""
    when: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Other key, or name of the context, -> the value with which this row applies: one value, a tuple of values, True
    for every value that is not disabled (`is_off`), or False for a disabled value."""
    note: str = ""
    """What the documentation adds to the path."""

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the RunConfig fields that it sets."""
        named = (self.to,) if isinstance(self.to, str) else self.to
        return tuple(path for path in named if _PATH.fullmatch(path))

    def converted(self, value: Any) -> Any:
        """Returns the value of the RunConfig field."""
        if value is None or self.convert is None:
            return value
        return self.convert.get(value) if isinstance(self.convert, Mapping) else self.convert(value)

    def __str__(self) -> str:
        """Describes the row, for the documentation."""
        text = self.to if isinstance(self.to, str) else " and ".join(self.to)
        if isinstance(self.convert, Mapping):
            text += ": " + ", ".join(f"{new!r} for {old!r}" for old, new in self.convert.items())
        if conditions := " and ".join(_condition(key, value) for key, value in self.when.items()):
            text += f", {conditions}"
        text += f"; {self.note}" if self.note else ""
        return text + ("" if self.default is None else f" (default {self.default!r})")


@dataclass(frozen=True, slots=True)
class Moved:
    """An alias: the name of another key in another version of the original."""

    to: str
    """The aliased key of the table. A default value is ignored; different non-default values of both are an error."""


@dataclass(frozen=True, slots=True)
class Restricted:
    """A key that supports only some values. None among them stands for every disabled value (`is_off`)."""

    values: tuple[Any, ...]
    instead: str
    """What to write instead of an unsupported value."""
    default: Any = None
    switch: str = ""
    """Name of the section's enabling key; checked before `enable` and `enabled`."""


@dataclass(frozen=True, slots=True)
class Ignored:
    """A key without effect: any value is accepted."""

    why: str


Entry = Mapped | Moved | Restricted | Ignored


@dataclass(frozen=True, slots=True)
class TranslatedConfig:
    """Another trainer's config, translated to a Trivium config."""

    config: dict[str, Any]
    """A complete RunConfig as a mapping."""
    notes: tuple[str, ...] = ()
    """Settings without effect, and steps that remain for the user."""

    def to_yaml(self) -> str:
        """Returns the config as YAML for `trivium run`."""
        places = list(RunConfig.model_fields)
        sections = sorted(self.config.items(), key=lambda section: places.index(section[0]))
        return yaml.safe_dump(plain(dict(sections)), sort_keys=False, allow_unicode=True)


def under(prefix: str, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Returns the entries with `prefix.` before each key."""
    return {f"{prefix}.{name}": entry for name, entry in entries.items()}


def ignored(why: str, *names: str) -> dict[str, Entry]:
    """Returns an `Ignored` entry for each name. A string may hold several names, separated by spaces."""
    return dict.fromkeys(" ".join(names).split(), Ignored(why))


def numbers_of_samples(samples: int) -> list[int]:
    """Returns the k of pass@k: the powers of two up to this number of samples, and the number itself."""
    return sorted({*(2**power for power in range(samples.bit_length())), samples})


def if_on(value: Any) -> Any:
    """Returns a value; None, which sets nothing, for 0, false and empty text. A converter of `Mapped` rows."""
    return value or None


def unless_all_linear(targets: object) -> object:
    """Returns the layers of an adapter; None for PEFT's name of all linear layers, which are the default here. A
    converter of `Mapped` rows."""
    return None if targets == "all-linear" else targets


def is_off(value: object, *switches: str) -> bool:
    """Whether a value is disabled: null, false, 0, empty, or a mapping whose switch (else every value) is disabled."""
    if isinstance(value, dict):
        switch = next((name for name in (*switches, "enable", "enabled") if name in value), None)
        return all(map(is_off, value.values())) if switch is None else is_off(value[switch])
    return value is None or value is False or value in (0, "", "null", [])


@dataclass(frozen=True)
class KeyTable:
    """The keys of another trainer's config."""

    entries: Mapping[str, Entry]
    """Dotted key -> its entry. `Ignored` and `Restricted` entries of `a` apply to every `a.b` without its own entry."""
    unsupported: Mapping[str, str] = field(default_factory=dict[str, str])
    """Value -> the name of the unsupported backend, for errors."""
    marks: frozenset[str] = frozenset()
    """Names of keys that are skipped in every section."""

    def __post_init__(self) -> None:
        sections = {key.rpartition(".")[0] for key in self.entries}
        while above := {section.rpartition(".")[0] for section in sections} - sections:
            sections |= above
        object.__setattr__(self, "sections", frozenset(sections))

    sections: frozenset[str] = field(init=False, repr=False)
    """All keys that contain other keys."""

    def entry_of(self, key: str) -> Entry | None:
        """Returns the key's own entry, or its nearest ancestor's entry if that is `Ignored` or `Restricted`.

        Returns None for an unknown key and for a probable misspelling of another key in a section.
        """
        above = key
        while above and above not in self.entries:
            above = above.rpartition(".")[0]
        entry = self.entries.get(above)
        # A section without effect accepts any key, but may hold keys that have one: their misspelling must not pass as
        # one of the others. 0.8 is stricter than for suggestions, because here it refuses.
        misspelt = above != key and above in self.sections and self._nearest(key, cutoff=0.8) not in (None, above)
        return None if misspelt or (isinstance(entry, Mapped | Moved) and above != key) else entry

    def default_of(self, key: str) -> Any:
        """Returns the original's default of a key."""
        entry = self.entries[key]
        if isinstance(entry, Mapped):
            return _typed(entry.default, entry)[0]
        return entry.default if isinstance(entry, Restricted) else None

    def read(self, config: object) -> Settings:
        """Reads a config: a mapping, an OmegaConf container or an object with attributes, nested to any depth.

        Resolves references (`${a.b}`) and treats `???` as unset. Invalid keys and values are listed in `problems`.
        """
        values: dict[str, Any] = {}
        problems: list[Problem] = []
        moved: list[tuple[str, str, Any]] = []
        for key, value in self._leaves(self._unmarked(resolved(plain(config))), ""):
            entry = self.entries.get(key)
            target = entry.to if isinstance(entry, Moved) else key
            wrong = [problem._replace(where=key) for problem in self._problems(target, value)]
            problems += wrong
            if wrong:
                continue
            entry, value = self.entries.get(target), unescaped(value)
            value = _typed(value, entry)[0] if isinstance(entry, Mapped) else value
            if target == key and value is not None:
                values[key] = value
            elif target != key:
                moved.append((key, target, value))
        for key, target, value in moved:
            if value is None or value == self.default_of(target) or isinstance(self.entry_of(target), Ignored):
                continue  # a default does not override the aliased key
            if values.get(target) not in (None, self.default_of(target), value):
                problems.append(_contradiction(key, value, target, values[target]))
            values[target] = value
        return Settings(self, values, tuple(problems))

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yields (key, description of its entry) of every key, for documentation."""
        for key, entry in self.entries.items():
            match entry:
                case Mapped():
                    yield key, str(entry)
                case Moved(to):
                    yield key, f"the same as `{to}`"
                case Restricted(values, instead):
                    built = " or ".join("unset" if value is None else repr(value) for value in values)
                    yield key, f"only {built}; another value is an error: {instead}"
                case Ignored(why):
                    yield key, f"no effect: {why}"

    def _unmarked(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: self._unmarked(part) for name, part in value.items() if name not in self.marks}
        return value

    def _leaves(self, value: object, key: str) -> Iterator[tuple[str, Any]]:
        """Yields (dotted key, value) of every known key and innermost value. Skips missing values (`???`)."""
        known_whole = key in self.entries and key not in self.sections
        value = None if value == _NONE else value
        if isinstance(value, dict) and value and not known_whole:
            for name, part in value.items():
                yield from self._leaves(part, f"{key}.{name}" if key else name)
        elif key and not is_missing(value) and (known_whole or value != {}):
            yield key, value

    def _problems(self, key: str, value: object) -> Iterator[Problem]:
        entry, text = self.entry_of(key), f"{value!r:.80}"
        if entry is None and value is None and key in self.sections:
            return  # an empty section
        if entry is None:
            near = self._nearest(key)
            do = "leave it out" + (f", or write {near!r} if you mean that" if near else "")
            yield Problem(key, text, "no key of that name is translated", do)
        elif not isinstance(entry, Ignored) and (reference := unresolved(value)):
            yield Problem(key, text, f"{reference} leads to no value", "set the key that it names, or write the value")
        elif isinstance(entry, Restricted) and not _is_supported(value, entry):
            name = self.unsupported.get(str(value).lower())
            cause = f"{name} is not supported" if name else "this value is not supported"
            yield Problem(key, text, cause, entry.instead)
        elif isinstance(entry, Mapped) and (wanted := _typed(value, entry)[1]):
            yield Problem(key, text, f"it must be {wanted}", "correct the value")

    def _nearest(self, key: str, cutoff: float = 0.75) -> str | None:
        """Returns the most probable intended key, or None.

        Compares the first unknown part of the key with its siblings, then looks for the last part in deeper sections.
        """
        parts = key.split(".")
        depth = next(n for n in range(len(parts) - 1, -1, -1) if not n or ".".join(parts[:n]) in self.sections)
        section, last = "".join(f"{part}." for part in parts[:depth]), parts[-1]
        inside = [name.removeprefix(section) for name in self.entries if name.startswith(section)]
        children = {name.partition(".")[0] for name in inside}
        for child in difflib.get_close_matches(parts[depth], children, n=1, cutoff=cutoff):
            whole = ".".join([child, *parts[depth + 1 :]])
            return section + (whole if whole in inside else child)
        same = [name for name in inside if name.rpartition(".")[2] == last]
        return section + same[0] if len(same) == 1 or (same and section) else None


@dataclass(frozen=True)
class Settings:
    """The values of a config by dotted key. Unset keys have the original's defaults."""

    table: KeyTable
    values: Mapping[str, Any]
    """The valid values that the config sets."""
    problems: tuple[Problem, ...] = ()
    """The invalid keys and values."""

    def __getitem__(self, key: str) -> Any:
        """Returns the value of a key of the table, or the original's default if it is unset."""
        value = self.values.get(key)
        return self.table.default_of(key) if value is None else value

    def has(self, key: str) -> bool:
        """Whether the key has a value."""
        return self.values.get(key) is not None

    def first(self, *keys: str) -> Any:
        """Returns the first value among these keys that differs from its default, else the first that is set, else the
        first default that is not None."""
        values = [self[key] for key in sorted(keys, key=self._weight, reverse=True)]
        return next((value for value in values if value is not None), None)

    def section(self, prefix: str) -> dict[str, Any]:
        """Returns the keys below `prefix` as nested mappings. Unset keys have the original's defaults."""
        keys = dict.fromkeys(key for key in (*self.table.entries, *self.values) if key.startswith(f"{prefix}."))
        section: dict[str, Any] = {}
        for key in keys:
            *above, last = key.removeprefix(f"{prefix}.").split(".")
            inner = section
            for name in above:
                if not isinstance(inner.get(name), dict):
                    inner[name] = {}
                inner = inner[name]
            if not isinstance(inner.get(last), dict):
                inner[last] = self[key] if key in self.table.entries else self.values[key]
        return section

    def mapped(self, **context: Any) -> dict[str, Any]:
        """Returns the RunConfig fragment of every `Mapped` row that has a path and whose condition holds.

        `context` has the values by name that conditions read in addition to keys. Of several keys with the same target,
        a value that differs from its default overrides one that is set to its default, and that overrides the default
        of an unset key. Among equals, the last one in the table applies.
        """
        fragment: dict[str, Any] = {}
        for key in sorted(self.table.entries, key=self._weight):
            entry = self.table.entries[key]
            if not isinstance(entry, Mapped) or not self._applies(entry.when, context):
                continue
            for path in entry.paths:
                value = entry.converted(self[key])
                for name in reversed(path.split(".")) if value is not None else ():
                    value = {name: value}
                fragment = merged(fragment, value or {})
        return fragment

    def _weight(self, key: str) -> int:
        """Returns 0 for an unset key, 1 for a key with its default as its value, and 2 for another value.

        A config that is composed with the original's defaults, as by Hydra, sets every key. A default in it must not
        override a value that the user wrote.
        """
        return 0 if not self.has(key) else 1 if self.values[key] == self.table.default_of(key) else 2

    def _applies(self, when: Mapping[str, Any], context: Mapping[str, Any]) -> bool:
        """Whether the condition of a row holds."""
        for key, wanted in when.items():
            value = context[key] if key in context else self[key]
            if isinstance(wanted, bool):
                holds = is_off(value) is not wanted
            else:
                holds = value in wanted if isinstance(wanted, tuple) else value == wanted
            if not holds:
                return False
        return True

    def notes(self) -> Iterator[str]:
        """Yields a note for each setting without effect."""
        for key, value in self.values.items():
            entry = self.table.entry_of(key)
            if isinstance(entry, Ignored) and not is_off(value):
                yield f"{key}: no effect: {entry.why}"


def announce(notes: Iterable[str]) -> None:
    """Logs settings without effect. Each note is logged once per process."""
    # A script may build several objects from one config, and each of them announces its notes.
    new = [note for note in dict.fromkeys(notes) if note not in _announced]
    _announced.update(new)
    if new:
        _log.warning("%d settings have no effect:\n  %s", len(new), "\n  ".join(new))


def refuse(problems: Iterable[Problem], wanted: str = "a config that can be translated") -> None:
    """Raises ConfigError with all problems, if any."""
    if listed := list(problems):
        raise ConfigError(wanted, f"{len(listed)} problem(s)", "fix them all at once:", listed)


def _condition(key: str, value: object) -> str:
    """Describes one condition of a row."""
    if isinstance(value, bool):
        return f"{'with' if value else 'without'} {key}"
    return f"with {key} {' or '.join(map(str, value)) if isinstance(value, tuple) else value}"


def _contradiction(key: str, value: object, target: str, other: object) -> Problem:
    do = f"set only {target}, or the same value in both"
    return Problem(key, repr(value), f"{target} is {other!r}, and both are the same", do)


def _is_supported(value: object, entry: Restricted) -> bool:
    off = None in entry.values and True not in entry.values and is_off(value, entry.switch)
    return value is None or off or value in entry.values


def _expanded(value: Any) -> tuple[Any, str]:
    """Expands `~` in a path or in a list of paths. Returns (the value, the expected type if the type is wrong)."""
    if isinstance(value, list):
        parts = [_expanded(part) for part in value]
        return [path for path, _ in parts], next((wrong for _, wrong in parts if wrong), "")
    if value is None or isinstance(value, str):
        return value and os.path.expanduser(value), ""
    return value, "a path"


_TYPES: Mapping[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "a mapping",
}


def _typed(value: Any, entry: Mapped) -> tuple[Any, str]:
    """Converts a value to the entry's type. Returns (the value, the expected type if the conversion fails, else "")."""
    kind = entry.type or type(entry.default)
    if kind is Path:
        return _expanded(value)
    if value is None or kind not in _TYPES:
        return value, ""
    if value == "" and kind is not str:  # a shell variable without a value
        return None, ""
    if kind is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value), ""
    if kind in (int, float) and isinstance(value, str):  # YAML reads 1e-6 as text
        try:
            value = float(value)
        except ValueError:
            return value, _TYPES[kind]
    if kind is bool:
        fits = value in (True, False) if isinstance(value, int) else False
        value = bool(value) if fits else value
    elif kind is int:
        fits = isinstance(value, int | float) and not isinstance(value, bool) and value == int(value)
        value = int(value) if fits else value
    elif kind is float:
        fits = isinstance(value, int | float) and not isinstance(value, bool)
    else:
        fits = isinstance(value, kind)
    return value, "" if fits else _TYPES[kind]
