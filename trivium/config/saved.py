"""YAML files that Trivium writes itself, such as the config and the plan in a run directory.

LibYAML, with which most builds of PyYAML come, reads and writes them in a tenth of the time. A user's file is read by
`trivium.config.reading`, whose errors show the line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
BESIDE = "config.run.yaml"
"""The config of a run in whose directory a config.yaml of the user lies."""


def config_file(run_dir: Path) -> Path:
    """The file in which the run of a directory saved its config."""
    beside = run_dir / BESIDE
    return beside if beside.is_file() else run_dir / "config.yaml"


def from_yaml(text: str) -> Any:
    """The value of a YAML text. Raises yaml.YAMLError for a damaged one."""
    return yaml.load(text, _LOADER)


def as_yaml(value: object, *, width: int | None = None) -> str:
    """The value as YAML, with the keys of mappings in their order; `width` is the length of its longest lines."""
    return yaml.dump(value, Dumper=_DUMPER, sort_keys=False, allow_unicode=True, width=width)
