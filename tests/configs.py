"""Small configs: the sections that most tests of whole configs share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from failing import refused

from trivium.config import RunConfig, config_from_mapping
from trivium.foundation.errors import ConfigError


def tiny_model(**changes: Any) -> dict[str, Any]:
    """The section `model` of a model with one small layer that writes sums."""
    sizes = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "mlp": 64, "max_position": 24}
    return {"kind": "tiny", "alphabet": "0123456789+=", **sizes, **changes}


def minimal(**sections: Any) -> dict[str, Any]:
    """The least that a config must say, with these sections added or replaced."""
    return {"model": {"kind": "tiny"}, "tasks": {"train": {"kind": "arithmetic"}}, "rewards": ["exact"], **sections}


def configured(base: Path | None = None, /, **sections: Any) -> RunConfig:
    """`minimal` as a config whose paths are relative to `base`."""
    return config_from_mapping(minimal(**sections), base)


def with_algorithm(
    algorithm: object, base: Path | None = None, *, sections: dict[str, Any] | None = None, **schedule: Any
) -> RunConfig:
    """The least config with this algorithm, a scripted engine, this schedule and further sections."""
    engine = {"kind": "scripted", "replies": ["1"]}
    return configured(base, **{"algorithm": algorithm, "engine": engine, "schedule": schedule, **(sections or {})})


def problems_of(make: Callable[..., object], *args: Any, **kwargs: Any) -> dict[str, str]:
    """The problems of the config that `make` refuses: where, and what each says."""
    with refused(ConfigError) as caught:
        make(*args, **kwargs)
    return {where: " ".join(rest) for where, *rest in caught.value.problems}


def algorithm_problems(algorithm: object, **given: Any) -> dict[str, str]:
    return problems_of(with_algorithm, algorithm, **given)
