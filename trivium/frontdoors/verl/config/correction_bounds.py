"""The bounds of verl's rollout correction, as options of `trivium.algorithms.correction`."""

from __future__ import annotations

from typing import Any

from trivium.foundation.errors import ConfigError

_LEVELS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
"""Rejection in verl 0.6 and 0.7, by the bounds of a ratio -> its name since."""


def weight_bounds(threshold: object) -> dict[str, Any]:
    """Returns the options of a threshold: `0.5_5.0` zeroes weights outside, one number truncates them from above."""
    low, is_interval, high = str(threshold).partition("_")
    return {"threshold": [low, high], "outside": "mask"} if is_interval else {"threshold": threshold}


def veto(threshold: float) -> dict[str, float | tuple[float, float]]:
    """Returns the rejection of sequences with a token whose ratio is below the threshold."""
    return {"seq_max_k1": (1e-9, 1 / threshold)}  # as engine / trainer; the first bound is below any clamped ratio


def rejection(options: str, thresholds: object) -> dict[str, float | tuple[float, float]]:
    """Returns {option: bound or (low, high)} of verl's comma lists. Raises ConfigError unless there is one bound for
    all options, or one for each."""
    names = [_LEVELS.get(option.strip(), option.strip()) for option in options.split(",")]
    bounds = [bound.strip() for bound in str("" if thresholds is None else thresholds).split(",") if bound.strip()]
    try:
        numbers = [tuple(float(part) for part in bound.split("_")) for bound in bounds]
    except ValueError:
        numbers = []
    if len(numbers) == 1:
        numbers *= len(names)
    if len(numbers) != len(names):
        raise ConfigError(
            f"rollout_rs_threshold {thresholds!r}",
            f"rollout_rs has {len(names)} option(s)",
            "give one number, or low_high, for each (or one for all)",
        )
    return {name: (pair[0], pair[1]) if len(pair) == 2 else pair[0] for name, pair in zip(names, numbers, strict=True)}
