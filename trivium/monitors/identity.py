"""Shared code of monitors with a tracking server: the id of the run, and its config as settings."""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trivium.config.saved import config_file, from_yaml
from trivium.foundation.atomic import atomic_write

_SECRET = re.compile(r"(^|_)(key|token|password|secret)$")
"""Keys of settings that are left out."""
_PASSWORD = re.compile(r"(://[^:/@]*):[^@/]*@")
"""The user and the password of a URL."""


def remembered(path: Path, resume_step: int, make: Callable[[], str]) -> str:
    """Returns the id in the file `path`. Makes and stores a new one if the run begins at step 0 or has no such file."""
    if resume_step and path.is_file():
        return path.read_text(encoding="utf-8").strip()
    identity = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, identity + "\n")
    return identity


def new_id() -> str:
    """Returns a random id."""
    return secrets.token_hex(8)


def settings_of(run_dir: Path) -> dict[str, Any]:
    """Returns the config of the run, one entry per value (`schedule.steps`); empty if it does not exist yet.

    The result leaves the machine: keys that name a secret, and passwords in URLs, are removed.
    """
    path = config_file(run_dir)
    config = from_yaml(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return dict(_flat(config, ""))


def failing() -> bool:
    """Whether an exception is propagating, so that a monitor that is being closed marks the run as failed."""
    return sys.exception() is not None


def _flat(value: object, where: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping | list):
        parts = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, part in parts:
            if not _SECRET.search(str(key)):
                yield from _flat(part, f"{where}.{key}" if where else str(key))
    else:
        yield where, _PASSWORD.sub(r"\1:***@", value) if isinstance(value, str) else value
