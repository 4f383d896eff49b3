"""The arguments of verl's scorers, and its default scorer.

A scorer of verl is `f(data_source=, solution_str=, ground_truth=, extra_info=)`, plain or `async`. It returns a number
or a dict whose `score` is a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from trivium.foundation.errors import ConfigError
from trivium.rewards import by_source

PROGRAMS_RUN_HERE = "programs run in a sandbox on this machine (docs/extend-rewards.md)"


@dataclass(frozen=True, slots=True)
class RewardSample:
    """One row as arguments of a verl scorer."""

    row: int
    uid: str
    data_source: str
    prompt: str
    response: str
    length: int
    """Number of response tokens."""
    ground_truth: Any
    extra_info: dict[str, Any]

    @property
    def name(self) -> str:
        truth = repr(self.ground_truth)
        text = truth if len(truth) <= 60 else truth[:57] + "..."
        uid = f" of {self.uid}" if self.uid else ""
        return f"sample {self.row}{uid} (data source {self.data_source!r}, ground truth {text})"

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "data_source": self.data_source,
            "solution_str": self.response,
            "ground_truth": self.ground_truth,
            "extra_info": self.extra_info,
        }


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: object,
    extra_info: Mapping[str, Any] | None = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: AbstractContextManager[object] | None = None,
    memory_limit_mb: int | None = None,
    limits: by_source.GraderLimits | None = None,
    **beside: object,
) -> by_source.Score:
    """Calls `trivium.rewards.by_source.default_compute_score` with verl's arguments. A grader holds the
    `concurrent_semaphore` while it runs. Arguments in `beside` are ignored.

    Raises ConfigError for a `sandbox_fusion_url`, and the errors of that function.
    """
    del beside
    if sandbox_fusion_url:
        raise ConfigError("sandbox_fusion_url", sandbox_fusion_url, f"leave it out: {PROGRAMS_RUN_HERE}")
    with concurrent_semaphore or nullcontext():
        return by_source.default_compute_score(
            data_source, solution_str, ground_truth, extra_info, memory_limit_mb=memory_limit_mb, limits=limits
        )
