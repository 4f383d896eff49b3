"""Reads a launch script of verl: the overrides of the command in it that starts `main_ppo`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trivium.config import read_yaml
from trivium.config.reading import read_bounded
from trivium.foundation.errors import ConfigError
from trivium.frontdoors.overrides import overridden
from trivium.frontdoors.shell import OUTPUT, commands
from trivium.frontdoors.verl.main_ppo import config_of

_ENTRY_POINT = re.compile(r"(?:.*[./])?(main_(?:ppo|dapo)\w*|fully_async_main)(?:\.py)?")
"""Matches the modules and files that train with the keys of verl's `ppo_trainer`."""
_PROGRAM = re.compile(r"verl[./][\w./]+|.*\.py")
_REPLACED = "`python -m trivium.frontdoors.verl` takes the arguments of `python3 -m verl.trainer.main_ppo`"
_OUTPUT = re.compile(r"[-_.]?" + re.escape(OUTPUT))
_BRANCH = re.compile(r"^\s*(if|case|for|while|until)\b", re.MULTILINE)


def read(words: Sequence[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Reads a config in YAML or a launch script, with the overrides after it, and returns (the config, notes).

    Raises ConfigError for a Python file, and for a script without one command that starts `main_ppo`.
    """
    first, *overrides = words
    path = Path(first).expanduser()
    if path.suffix == ".py":
        do = f"name the shell script that starts it, or a config in YAML; {_REPLACED}"
        raise ConfigError(f"a config or a launch script of verl in {path}", "a Python program", do)
    if path.suffix not in (".sh", ".bash", ".slurm", ".sbatch"):
        return overridden(read_yaml(path), overrides), ()
    try:
        text = read_bounded(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the launch script {path}", str(error), "name a shell script, or a config in YAML"
        ) from error
    arguments, notes = _arguments(text, path), list[str]()
    if _BRANCH.search(text):
        notes.append(f"{path.name}: conditions and loops are not evaluated: the last assignment of a variable counts")
    printed = [word.partition("=")[0].lstrip("+") for word in arguments if OUTPUT in word]
    notes += [f"{key}: the output of `$(...)` is left out: commands are not run" for key in printed]
    return config_of([_OUTPUT.sub("", word) for word in [*arguments, *overrides]]), tuple(notes)


def _arguments(text: str, path: Path) -> list[str]:
    """Returns the arguments of the only command in a script that starts `main_ppo`."""
    starts: list[list[str]] = []
    others: list[str] = []
    for words in commands(text, path):
        place = next((at for at, word in enumerate(words) if _ENTRY_POINT.fullmatch(word)), None)
        if place is not None:
            starts.append(words[place + 1 :])
        others += [word for word in words[:4] if place is None and _PROGRAM.fullmatch(word)]
    if len(starts) != 1:
        cause = f"{len(starts)} commands" if starts else ", ".join(["none", *others])
        do = f"give a script with one, or its overrides after a config in YAML; {_REPLACED}"
        raise ConfigError(f"a command in {path} that starts verl.trainer.main_ppo", cause, do)
    # A variable without a value is no argument: bash expands it to nothing.
    return [word for word in starts[0] if not re.fullmatch(r"\$\{?\w+\}?", word)]
