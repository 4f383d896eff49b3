"""Parses calls of LightRFT's launchers into a mapping from flag to value: words, shell scripts and files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from trivium.config import read_yaml
from trivium.config.reading import read_bounded
from trivium.errors import ConfigError
from trivium.frontdoors.lightrft.config.config_table import TABLE
from trivium.frontdoors.overrides import overridden
from trivium.frontdoors.shell import ASSIGNMENT, OUTPUT, commands
from trivium.frontdoors.tables import Ignored, Restricted

PROCESSES = "torchrun"
"""The key for the number of processes that the command line starts."""
_LAUNCHERS = ("torchrun", "python", "python3", "deepspeed", "accelerate", "env", "nohup", "bash", "sh")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_DO = "write the flags of train_colocate.py: --pretrain MODEL --prompt_data DATA ..."


def read(words: Sequence[str]) -> dict[str, Any]:
    """Parses `--flag value ...`, a whole command line, or a file followed by flags or overrides (`flag=value`).

    A file is a list of words (.json), a mapping from flag to value (.json, .yaml), or a shell script. Raises
    ConfigError if parsing fails.
    """
    first, *rest = words
    if first.startswith("-") or Path(first).name in _LAUNCHERS or ASSIGNMENT.fullmatch(first):
        return flags_of(words)
    flags = _flags_in(Path(first).expanduser())
    cut = next((place for place, word in enumerate(rest) if word.startswith("--")), len(rest))
    return overridden(flags, rest[:cut]) | (flags_of(rest[cut:]) if rest[cut:] else {})


def _flags_in(path: Path) -> dict[str, Any]:
    try:
        text = read_bounded(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the launch arguments in {path}", str(error), f"name a file, or {_DO}") from error
    if path.suffix not in (".json", ".yaml", ".yml"):
        return flags_of(_command(text, path))
    if path.suffix != ".json" and not text.lstrip().startswith("-"):
        return {flag.removeprefix("--"): value for flag, value in read_yaml(path).items()}
    try:
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"the launch arguments in {path}", str(error), "correct the file") from error
    if isinstance(content, Mapping):
        return {str(flag).removeprefix("--"): value for flag, value in content.items()}
    if isinstance(content, list):
        return flags_of([str(word) for word in content])
    raise ConfigError(
        f"the launch arguments in {path}", f"a {type(content).__name__}", "give a list of words, or {flag: value}"
    )


# --------------------------------------------------------------------------- words


def flags_of(words: Sequence[str]) -> dict[str, Any]:
    """Parses a command line, which may begin with `torchrun ... train_colocate.py`. The last of repeated flags counts.

    A flag without a value is True; a flag with several values is a list. Raises ConfigError for a word before the first
    flag.
    """
    launcher, arguments = _separated([word for word in words if word.strip()])
    flags: dict[str, Any] = {}
    name = None
    for word in arguments:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.removeprefix("--").partition("=")
            flags[name] = [value] if equals else []
        elif word == OUTPUT and (name is None or flags[name] or _is_switch(name)):
            raise ConfigError("flags that a command prints, `$(...)`", "commands are not run", "write the flags")
        elif name is None or (word.startswith("-") and word[1:2].isalpha()):
            raise ConfigError(f"the argument {word!r}", "it is no flag, and belongs to none", _DO)
        else:
            flags[name].append(word)
    values = {flag: _value(flag, given) for flag, given in flags.items()}
    processes = _processes(launcher)
    return values | ({PROCESSES: processes} if processes > 1 else {})


def _is_switch(flag: str) -> bool:
    """Whether a flag takes no value."""
    return isinstance(TABLE.default_of(flag), bool) if TABLE.entry_of(flag) is not None else False


def _separated(words: list[str]) -> tuple[list[str], list[str]]:
    """Returns (the launcher's words, the script's words)."""
    if words and words[0].startswith("--"):
        return [], words
    for place, word in enumerate(words):
        if word == "-m" and not _is_launcher_module(words[place + 1 : place + 2]):
            return words[:place], words[place + 2 :]
        if word.endswith(".py"):
            return words[:place], words[place + 1 :]
    raise ConfigError("a command line of a launcher", " ".join(words[:4]) or "nothing", _DO)


def _is_launcher_module(names: Sequence[str]) -> bool:
    return any(name.startswith(("torch.distributed", "accelerate")) for name in names)


def _processes(launcher: Sequence[str]) -> int:
    """Returns the number of processes that a launcher starts on all machines; 1 by default."""
    product, words = 1, list(launcher)
    for place, word in enumerate(words):
        name, equals, value = word.lstrip("-").replace("-", "_").partition("=")
        value = value if equals else next(iter(words[place + 1 : place + 2]), "")
        if name in ("nnodes", "nproc_per_node", "num_processes") and value.isdigit():
            product *= int(value)
    return product


def _value(flag: str, words: list[str]) -> Any:
    """Returns the value of a flag. For entries without a type, text that looks like a number is converted."""
    values = [_number(word) if isinstance(TABLE.entry_of(flag), Restricted | Ignored) else word for word in words]
    return True if not values else values[0] if len(values) == 1 else values


def _number(word: str) -> str | float:
    return float(word) if _NUMBER.fullmatch(word) else word


# --------------------------------------------------------------------------- shell scripts


def _command(text: str, path: Path) -> list[str]:
    """Returns the words of the launcher's command in a shell script, with the script's variables expanded."""
    flagged = [words for words in commands(text, path) if any(word.startswith("--") for word in words)]
    flagged = [words for words in flagged if "--pretrain" in words] or flagged
    if len(flagged) != 1:
        raise ConfigError(
            f"the launcher's command in {path}",
            f"{len(flagged)} commands with flags",
            "give a script with one, or the flags themselves after `--`",
        )
    return flagged[0]
