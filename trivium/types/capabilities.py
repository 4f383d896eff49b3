"""Capabilities: the abilities that a plugin declares."""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import FunctionType

from trivium.foundation.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The abilities of a plugin. Its class, instance or function declares `capabilities = Capabilities(...)`; without a
    declaration the defaults apply. Each field concerns one kind of plugin."""

    # buffers
    explored: bool = True
    """Explorers fill it: it issues slots. False: it reads existing data."""
    shared: bool = False
    """Several processes can use it. Its class has `open_board(config, *, name)`, which opens the run's board in the
    same place, and `claim(config, *, name, run_dir)`, which reserves the name of a run or raises ConfigError."""
    # rewards
    remote: bool = False
    """It calls a server, so its value for the same completion may change over time."""
    # sample strategies
    mixed: bool = False
    """A batch may mix experts' completions with the policy's."""
    judges: bool = False
    """It scores the groups of a step itself, so explorers compute no rewards."""
    # operators
    drops: bool = True
    """It may refuse groups."""
    # workflows
    gives_rewards: bool = True
    """It may return rewards itself. False: reward functions are required."""
    observes: bool = True
    """The policy may read further messages after its first turn."""
    # weight channels
    local: bool = False
    """Both ends are in one process."""
    collective: bool = False
    """It sends a version to all explorers at once and keeps none."""
    uses_directory: bool = True
    """It keeps versions as files in `sync.dir`."""
    sends_differences: bool = False
    """It can send what changed since the version before. Its constructor takes `full_every` (`sync.full_every`)."""
    # rollout engines
    exact_sampling: bool = False
    """It samples with the per-position uniforms of a request's key."""
    batch_invariant: bool = False
    """Log-probabilities are independent of the rest of the batch, bit for bit."""
    exact_log_prob: bool = True
    """Its log-probabilities equal the trainer's for the same weights, up to rounding. If not, the correction `auto`
    weights tokens even of fresh groups."""
    updates_in_flight: bool = False
    """`load` can change the weights in the middle of completions."""
    adopts_adapters: bool = False
    """`load` takes a LoRA adapter in place of all weights."""
    merges_adapters: bool = False
    """It adds such an adapter to its weights once, so that it samples as fast as with all weights."""
    extra: frozenset[str] = frozenset()
    """Further data that it can record for completions: names in `EXTRAS`."""
    adopts_weights: bool = True
    """It can load weights. False: its policy never changes, and `load` is an error."""
    # train engines
    multiple_ranks: bool = False
    """Several processes can train one model; its Config has `sequence_parallel`, `shard` and `parallel`."""


def capabilities_of(plugin: object) -> Capabilities:
    """The capabilities of a plugin (class, instance or function). Raises ConfigError for a plugin that declares a field
    of Capabilities as its own attribute, which would have no effect."""
    declared = getattr(plugin, "capabilities", None)
    if declared is not None:
        return declared
    names = [field.name for field in fields(Capabilities) if isinstance(getattr(plugin, field.name, None), bool)]
    if names:
        values = ", ".join(f"{name}={getattr(plugin, name)}" for name in names)
        owner = plugin if isinstance(plugin, type | FunctionType) else type(plugin)
        raise ConfigError(
            f"what {owner.__name__} can do",
            f"the attribute {', '.join(names)}, which Trivium does not read",
            f"declare `capabilities = Capabilities({values})` (trivium.types)",
        )
    return Capabilities()
