"""Shared by monitors with a tracking server: the id of the run, and its config as settings."""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from trivium.checkpoint.atomic import atomic_write

_SECRET = re.compile(r"(^|_)(key|token|password|secret)$")
_PASSWORD = re.compile(r"(://[^:/@]*):[^@/]*@")


def remembered(path: Path, resume_step: int, make: Callable[[], str]) -> str:
    """The id that the run directory remembers; a new one, made and written there, for a run that begins at step 0."""
    if resume_step and path.is_file():
        return path.read_text(encoding="utf-8").strip()
    identity = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, identity + "\n")
    return identity


def new_id() -> str:
    """An id that no other run has."""
    return secrets.token_hex(8)


def settings_of(run_dir: Path) -> dict[str, Any]:
    """The config of the run, one entry per value (`schedule.steps`); empty where there is none yet.

    It leaves the machine: keys that name a secret are left out, and passwords in URLs.
    """
    path = run_dir / "config.yaml"
    config = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return dict(_flat(config, ""))


def failing() -> bool:
    """Whether an error is on its way out: a crashed run must not look finished."""
    return sys.exception() is not None


def _flat(value: object, where: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping | list):
        parts = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, part in parts:
            if not _SECRET.search(str(key)):
                yield from _flat(part, f"{where}.{key}" if where else str(key))
    else:
        yield where, _PASSWORD.sub(r"\1:***@", value) if isinstance(value, str) else value
