"""Which phase bounds a run, in one line, and what would shorten it with this config."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from trivium.config import RunConfig


class Advice(NamedTuple):
    """What shortens a phase, where the condition is true for a stage."""

    do: str
    applies: Callable[[RunConfig], bool] = lambda stage: True


def _value(stage: RunConfig, *path: str) -> object:
    """The value at `path` in the config of a stage; None if its section has no such key."""
    value: object = stage
    for name in path:
        value = getattr(value, name, None)
    return value


def _on_gpus(stage: RunConfig) -> bool:
    return _value(stage, "train", "device") != "cpu"


def _has_adapter(stage: RunConfig) -> bool:
    return _value(stage, "train", "lora") is not None


BOUNDS: dict[str, tuple[str, Sequence[Advice]]] = {
    "wait": (
        "waiting for rollouts",
        [
            Advice("add engines or explorers"),
            Advice("distribute them (cluster.kind: ray)", lambda stage: stage.cluster.kind != "ray"),
            Advice(
                "let rollouts and training overlap (schedule.max_staleness)",
                lambda stage: not stage.schedule.max_staleness,
            ),
            Advice("shorten completions; rewards count as part of a rollout"),
        ],
    ),
    "update": (
        "training compute",
        [
            Advice("use more ranks or GPUs"),
            # Most CPUs have no products of bfloat16, and take 16 times as long with it.
            Advice(
                "train.dtype: bfloat16",
                lambda stage: _on_gpus(stage) and _value(stage, "train", "dtype") != "bfloat16",
            ),
            Advice("train.lora", lambda stage: not _has_adapter(stage)),
            Advice(
                "train.lora.layers", lambda stage: _has_adapter(stage) and not _value(stage, "train", "lora", "layers")
            ),
        ],
    ),
    "score": (
        "scoring passes",
        [
            Advice("leave out the KL term", lambda stage: bool(_value(stage, "algorithm", "kl", "coef"))),
            Advice(
                "algorithm.old_log_prob: rollout",
                lambda stage: _value(stage, "algorithm", "old_log_prob") not in (None, "rollout"),
            ),
            Advice("raise train.max_tokens_per_micro_batch"),
        ],
    ),
    "advantage": ("advantages and filters", [Advice("look at your own estimator, shaping or filters")]),
    "sync": (
        "weight sync",
        [
            Advice("raise sync.interval"),
            Advice("choose another sync.method"),
            Advice(
                "push adapters alone (train.lora)", lambda stage: _value(stage, "train", "lora", "push") != "adapter"
            ),
        ],
    ),
    "checkpoint": (
        "checkpoints",
        [
            Advice("set checkpoint.asynchronous", lambda stage: not stage.checkpoint.asynchronous),
            Advice("raise checkpoint.save_every"),
        ],
    ),
    "evaluate": ("evaluations", [Advice("raise evaluation.every"), Advice("lower evaluation.samples")]),
}
"""First part of a phase's name -> (title, what shortens it)."""


def verdict(seconds: Mapping[str, float], total: float, config: RunConfig | None = None) -> str:
    """Describes in one line what bounds a run of `total` seconds, given the seconds of its phases (named as in
    `time/`), with the advice that applies to a stage of the config: all of it if the config is unknown."""
    spent: dict[str, float] = {}
    for name, phase_s in seconds.items():
        kind = name.partition("/")[0]
        if kind in BOUNDS:
            spent[kind] = spent.get(kind, 0.0) + phase_s
    if not spent or total <= 0:
        return "nothing was measured"
    shares = {kind: kind_s / total for kind, kind_s in sorted(spent.items(), key=lambda item: -item[1])}
    first = next(iter(shares))
    rest = [f"{BOUNDS[kind][0]} {share:.0%}" for kind, share in shares.items() if kind != first and share >= 0.005]
    unmeasured = max(0.0, 1 - sum(shares.values()))
    rest += [f"loading and the rest {unmeasured:.0%}"] if unmeasured >= 0.005 else []
    others = f" ({', '.join(rest)})" if rest else ""
    what, advice = BOUNDS[first]
    cost = f"{shares[first]:.0%} of the trainer's time, {spent[first]:.1f} of {total:.1f} s"
    return f"bound by {what}: {cost}{others}; to shorten it, {_either(_that_apply(advice, config))}"


def _that_apply(advice: Iterable[Advice], config: RunConfig | None) -> list[str]:
    stages = None if config is None else [_on_this_machine(stage) for stage in config.stage_configs()]
    return [remedy.do for remedy in advice if stages is None or any(map(remedy.applies, stages))]


def _on_this_machine(stage: RunConfig) -> RunConfig:
    """The stage with the device and the type that `auto` means here."""
    return stage.model_copy(update={"train": stage.train.on_this_machine()})


def _either(choices: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(choices[:-1]), choices[-1]]))
