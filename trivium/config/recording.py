"""What rollouts must bring for training beside tokens and log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trivium.config.memory_estimate import replays_routing, shape_in
from trivium.errors import Problem
from trivium.registry import resolve
from trivium.types import capabilities_of

if TYPE_CHECKING:
    from trivium.config.schema import RunConfig


def recorded(config: RunConfig) -> tuple[str, ...]:
    """What the engine is asked to record of training rollouts: names of `EXTRAS`."""
    cut = config.engine.sampling.changes_distribution()
    return (*["routing"] * replays_routing(config), *["kept"] * bool(cut))


def recorded_in(config: RunConfig) -> str | None:
    """What is recorded of each token of a stage's rollouts and what it takes, in words; None: nothing."""
    lines: list[str] = []
    for what in recorded(config):
        if what == "routing":
            shape = shape_in(config)
            width = 0 if shape is None else shape.routing_per_token
            each = f", at most {width} bytes a token of prompt and completion" if width else ""
            lines.append(f"experts, chosen again in training{each}")
        else:
            sampling, each = config.engine.sampling, "up to half of the vocabulary's ids a token, a few as a rule"
            if sampling.top_k:
                each = f"at most {4 * sampling.top_k + 4} bytes a token"
            names = ", ".join(sampling.changes_distribution())
            lines.append(f"what {names} keep, over which log-probabilities are computed: {each}")
    return "; ".join(lines) or None


def _replays_routing(config: RunConfig) -> bool:
    return getattr(config.train, "router_replay", "off") == "rollout"


def check_recording(config: RunConfig) -> Iterator[Problem]:
    shape, kind = shape_in(config), config.engine.kind
    sampled = capabilities_of(resolve("buffers", config.buffer.kind)).explored
    records = capabilities_of(resolve("engines", kind)).extra if sampled else frozenset(recorded(config))
    if replays_routing(config):
        where, asked = "train.router_replay", "the experts that rollouts were sampled with"
        if shape is not None and shape.experts == 1:
            yield Problem(where, asked, "the model has no experts", "leave the key out")
        if "routing" not in records:
            yield Problem(where, asked, f"engine.kind {kind!r} does not record them", "use engine.kind torch")
    for name in config.engine.sampling.changes_distribution():
        where, asked = f"engine.sampling.{name}", f"{name} = {getattr(config.engine.sampling, name)} in training"
        if "kept" not in records:
            yield Problem(
                where,
                asked,
                f"it changes the sampled distribution, and engine.kind {kind!r} does not record what it keeps",
                "leave it out here (evaluation.sampling may use it), or use engine.kind torch",
            )
