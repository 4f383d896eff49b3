"""What rollouts must bring for training beside tokens and log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trivium.config.memory_estimate import shape_in
from trivium.errors import Problem
from trivium.registry import resolve
from trivium.types import capabilities_of

if TYPE_CHECKING:
    from trivium.config.schema import RunConfig


def recorded(config: RunConfig) -> tuple[str, ...]:
    """What the engine is asked to record of training rollouts: names of `EXTRAS`."""
    return ("routing",) if replays_routing(config) else ()


def replays_routing(config: RunConfig) -> bool:
    return getattr(config.train, "router_replay", "off") == "rollout"


def check_recording(config: RunConfig) -> Iterator[Problem]:
    if not replays_routing(config):
        return
    where, asked = "train.router_replay", "the experts that rollouts were sampled with"
    shape = shape_in(config)
    if shape is not None and shape.experts == 1:
        yield Problem(where, asked, "the model has no experts", "leave the key out")
    sampled = capabilities_of(resolve("buffers", config.buffer.kind)).explored
    if sampled and "routing" not in capabilities_of(resolve("engines", config.engine.kind)).extra:
        yield Problem(where, asked, f"engine.kind {config.engine.kind!r} does not record them", "use engine.kind torch")
