"""Config tables of the front doors: how each key of another trainer's config is translated.

A table lists every key that is accepted. A key that is not in it is an error, and so is a value that is not supported.
A key that is switched off, or that has no effect here, is accepted. All problems are reported at once.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trivium.errors import ConfigError, Problem
from trivium.frontdoors.plain_values import is_missing, plain, resolved, unresolved

_log = logging.getLogger("trivium")
_announced: set[str] = set()


@dataclass(frozen=True, slots=True)
class Mapped:
    """A key that sets something here."""

    to: str
    """The RunConfig key, or the part, that it sets."""
    default: Any = None
    """The original's default; values must be of its type."""
    type: type | None = None
    """The type of its values, where the default does not show it. Path: one or a list, in which `~` is the home."""


@dataclass(frozen=True, slots=True)
class Moved:
    """A key that is another one by the name of another version of the original."""

    to: str
    """The key of the table that it is. A default beside a choice is none; two choices are an error."""


@dataclass(frozen=True, slots=True)
class Restricted:
    """A key of which some values are supported. None among them stands for every value that is off (`is_off`)."""

    values: tuple[Any, ...]
    instead: str
    """What to do about another value."""
    default: Any = None
    switch: str = ""
    """The key of a section that turns it on; without one `enable` or `enabled`, where the section has it."""


@dataclass(frozen=True, slots=True)
class Ignored:
    """A key that changes no result here: any value is taken, and has no effect."""

    why: str


Entry = Mapped | Moved | Restricted | Ignored


@dataclass(frozen=True, slots=True)
class Translation:
    """Another trainer's config as a Trivium config."""

    config: dict[str, Any]
    """A complete RunConfig as a mapping."""
    notes: tuple[str, ...] = ()
    """What has no effect, and what is left to do."""

    def to_yaml(self) -> str:
        """The config as a file that `trivium run` reads."""
        return yaml.safe_dump(plain(self.config), sort_keys=False, allow_unicode=True)


def under(prefix: str, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Entries of a section by their dotted keys."""
    return {f"{prefix}.{name}": entry for name, entry in entries.items()}


def ignored(why: str, *names: str) -> dict[str, Entry]:
    """Entries without effect, for names separated by blanks."""
    return dict.fromkeys(" ".join(names).split(), Ignored(why))


def is_off(value: object, *switches: str) -> bool:
    """Whether a value is the same as unset: null, false, 0, empty, a mapping whose switch is off, or one of such."""
    if isinstance(value, dict):
        switch = next((name for name in (*switches, "enable", "enabled") if name in value), None)
        return all(map(is_off, value.values())) if switch is None else is_off(value[switch])
    return value is None or value is False or value in (0, "", "null", [])


@dataclass(frozen=True)
class Table:
    """The keys of another trainer's config."""

    entries: Mapping[str, Entry]
    """Dotted key -> its entry. `Ignored` and `Restricted` for `a` hold for every `a.b` that has no entry of its own."""
    unsupported: Mapping[str, str] = field(default_factory=dict[str, str])
    """A value -> the name of the backend that it asks for, for errors."""
    marks: frozenset[str] = frozenset()
    """Names of keys that have no effect in any section, and are passed over."""

    def __post_init__(self) -> None:
        sections = {key.rpartition(".")[0] for key in self.entries}
        while above := {section.rpartition(".")[0] for section in sections} - sections:
            sections |= above
        object.__setattr__(self, "sections", frozenset(sections))

    sections: frozenset[str] = field(init=False, repr=False)
    """Every key that has keys below it."""

    def entry_of(self, key: str) -> Entry | None:
        """The entry of a key: its own, or that of the nearest key above it, if that one is not mapped."""
        above = key
        while above and above not in self.entries:
            above = above.rpartition(".")[0]
        entry = self.entries.get(above)
        misspelt = above != key and above in self.sections and self._nearest(key, cutoff=0.8) not in (None, above)
        return None if misspelt or (isinstance(entry, Mapped | Moved) and above != key) else entry

    def default_of(self, key: str) -> Any:
        """The original's default of a key."""
        entry = self.entries[key]
        if isinstance(entry, Mapped):
            return _typed(entry.default, entry)[0]
        return entry.default if isinstance(entry, Restricted) else None

    def read(self, config: object) -> Settings:
        """The values of a config: a mapping, an OmegaConf container, or an object with attributes; values may nest.

        References (`${a.b}`) are followed; `???` is a value that is not set. What is wrong is in `problems`.
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
            entry = self.entries.get(target)
            value = _typed(value, entry)[0] if isinstance(entry, Mapped) else value
            if target == key:
                values[key] = value
            else:
                moved.append((key, target, value))
        for key, target, value in moved:
            if value is None or value == self.default_of(target) or isinstance(self.entry_of(target), Ignored):
                continue  # a default is no choice
            if values.get(target) not in (None, self.default_of(target), value):
                problems.append(_contradiction(key, value, target, values[target]))
            values[target] = value
        return Settings(self, values, tuple(problems))

    def rows(self) -> Iterator[tuple[str, str]]:
        """(key, its entry in words) of every key, for documentation."""
        for key, entry in self.entries.items():
            match entry:
                case Mapped(to, default):
                    yield key, to + ("" if default is None else f" (default {default!r})")
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
        """(dotted key, value) of what the table knows, or of the innermost values; those that are not set excepted."""
        known_whole = key in self.entries and key not in self.sections
        if isinstance(value, dict) and value and not known_whole:
            for name, part in value.items():
                yield from self._leaves(part, f"{key}.{name}" if key else name)
        elif key and not is_missing(value) and (known_whole or value != {}):
            yield key, value

    def _problems(self, key: str, value: object) -> Iterator[Problem]:
        entry, shown = self.entry_of(key), f"{value!r:.80}"
        if entry is None and value is None and key in self.sections:
            return  # an empty section
        if entry is None:
            near = self._nearest(key)
            do = "leave it out" + (f", or write {near!r} if you mean that" if near else "")
            yield Problem(key, shown, "no key of that name is translated", do)
        elif not isinstance(entry, Ignored) and (reference := unresolved(value)):
            yield Problem(key, shown, f"{reference} leads to no value", "set the key that it names, or write the value")
        elif isinstance(entry, Restricted) and not _is_supported(value, entry):
            name = self.unsupported.get(str(value).lower().removesuffix("_async"))
            found = f"{name} is not supported" if name else "this value is not supported"
            yield Problem(key, shown, found, entry.instead)
        elif isinstance(entry, Mapped) and (wanted := _typed(value, entry)[1]):
            yield Problem(key, shown, f"it must be {wanted}", "correct the value")

    def _nearest(self, key: str, cutoff: float = 0.75) -> str | None:
        """The key that was most likely meant: one that is written almost the same, at the first part that there is
        not, or one of this name further inside. None rather than a guess that misleads."""
        parts = key.split(".")
        depth = next(n for n in range(len(parts) - 1, -1, -1) if not n or ".".join(parts[:n]) in self.sections)
        section, last = "".join(f"{part}." for part in parts[:depth]), parts[-1]
        inside = [known.removeprefix(section) for known in self.entries if known.startswith(section)]
        children = {name.partition(".")[0] for name in inside}
        for child in difflib.get_close_matches(parts[depth], children, n=1, cutoff=cutoff):
            whole = ".".join([child, *parts[depth + 1 :]])
            return section + (whole if whole in inside else child)
        same = [name for name in inside if name.rpartition(".")[2] == last]
        return section + same[0] if len(same) == 1 or (same and section) else None


@dataclass(frozen=True)
class Settings:
    """The values of a config by dotted key, with the original's defaults."""

    table: Table
    values: Mapping[str, Any]
    """What is set, and right."""
    problems: tuple[Problem, ...] = ()
    """What is wrong."""

    def __getitem__(self, key: str) -> Any:
        """The value of a key of the table, or the original's default where it is not set."""
        value = self.values.get(key)
        return self.table.default_of(key) if value is None else value

    def has(self, key: str) -> bool:
        """Whether the key has a value."""
        return self.values.get(key) is not None

    def first(self, *keys: str) -> Any:
        """The value of the first of these keys that is set, else the first default that there is."""
        values = [self.values.get(key) for key in keys] + [self.table.default_of(key) for key in keys]
        return next((value for value in values if value is not None), None)

    def section(self, prefix: str) -> dict[str, Any]:
        """The keys below `prefix` as nested mappings, with the original's defaults."""
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

    def notes(self) -> Iterator[str]:
        """What is set and has no effect."""
        for key, value in self.values.items():
            entry = self.table.entry_of(key)
            if isinstance(entry, Ignored) and not is_off(value):
                yield f"{key}: no effect: {entry.why}"


def announce(notes: Iterable[str]) -> None:
    """Logs what has no effect, each note once in a process."""
    new = [note for note in dict.fromkeys(notes) if note not in _announced]
    _announced.update(new)
    if new:
        _log.warning("%d settings have no effect:\n  %s", len(new), "\n  ".join(new))


def refuse(problems: Iterable[Problem], asked: str = "a config that can be translated") -> None:
    """Raises ConfigError with all problems, if there are any."""
    if listed := list(problems):
        raise ConfigError(asked, f"{len(listed)} problem(s)", "fix them all at once:", listed)


def _contradiction(key: str, value: object, target: str, other: object) -> Problem:
    do = f"set only {target}, or the same value in both"
    return Problem(key, repr(value), f"{target} is {other!r}, and both are the same", do)


def _is_supported(value: object, entry: Restricted) -> bool:
    off = None in entry.values and True not in entry.values and is_off(value, entry.switch)
    return value is None or off or value in entry.values


def _expanded(value: Any) -> tuple[Any, str]:
    """A path, or several, with the user's home for `~`."""
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
    """The value as the entry's type, and what it must be where it is not that."""
    kind = entry.type or type(entry.default)
    if kind is Path:
        return _expanded(value)
    if value is None or kind not in _TYPES:
        return value, ""
    if kind is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value), ""
    if kind in (int, float) and isinstance(value, str):  # YAML reads 1e-6 as text
        try:
            value = float(value)
        except ValueError:
            return value, _TYPES[kind]
    if kind is bool:
        right = value in (True, False) if isinstance(value, int) else False
    elif kind is int:
        right = isinstance(value, int | float) and not isinstance(value, bool) and value == int(value)
        value = int(value) if right else value
    elif kind is float:
        right = isinstance(value, int | float) and not isinstance(value, bool)
    else:
        right = isinstance(value, kind)
    return value, "" if right else _TYPES[kind]
