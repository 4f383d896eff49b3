"""A Ray instance for a script: the one that runs, or a private one on this machine."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

from trivium.cluster.session import PRIVATE
from trivium.errors import MissingPackage


def connect(*options: Mapping[str, Any]) -> None:
    """Connects this process to Ray unless it is connected. `options` are mappings with arguments of `ray.init`, or with
    a mapping of them under `ray_init`.

    An instance that is started here ends with the process. Raises MissingPackage without Ray.
    """
    # Once Ray is imported, it has read all of them but this one.
    names = ["RAY_USAGE_STATS_ENABLED"] if "ray" in sys.modules else [*PRIVATE]
    os.environ |= {name: os.environ.get(name, PRIVATE[name]) for name in names}
    try:
        import ray
    except ImportError as error:
        raise MissingPackage("ray", "ray", "worker groups") from error
    if ray.is_initialized():
        return
    said: dict[str, Any] = {"include_dashboard": False, "logging_level": logging.WARNING}
    for option in options:
        said |= option.get("ray_init") or {name: v for name, v in option.items() if name not in ("timeline_json_file",)}
    ray.init(**{name: value for name, value in said.items() if value is not None})
