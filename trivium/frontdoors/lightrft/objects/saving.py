"""Saves a trainer's checkpoints, and resumes from them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trivium.frontdoors.lightrft.arguments import option
from trivium.frontdoors.lightrft.objects.checkpoints import checkpoints

_ACTOR, _CRITIC = "_actor", "_critic"


def save(trainer: Any, args: Any, tag: str, client_states: dict[str, Any]) -> None:
    """Saves the critic to `_critic` and the actor to `_actor` under `args.ckpt_path`, unless `disable_ds_ckpt`.

    Each checkpoint has weights, optimizer, scheduler and `client_states`; the actor's also has the moving average.
    `save_hf_ckpt` adds the directory `{tag}_hf`.
    """
    folder, strategy = Path(args.ckpt_path), trainer.strategy
    limits = (int(option(args, "max_ckpt_num")), option(args, "max_ckpt_mem"))
    if not trainer.disable_ds_ckpt:
        if trainer.critic is not None:
            critic = {"optimizer": trainer.critic_optim, "scheduler": trainer.critic_scheduler}
            strategy.save_ckpt(trainer.critic, folder / _CRITIC, tag, *limits, client_states, **critic)
        # The actor is saved last, so that a complete actor checkpoint implies a complete critic checkpoint.
        actor = {"optimizer": trainer.actor_optim, "scheduler": trainer.actor_scheduler}
        actor["ema_model"] = trainer.ema_model
        strategy.save_ckpt(trainer.actor, folder / _ACTOR, tag, *limits, client_states, **actor)
    if trainer.save_hf_ckpt:
        strategy.save_model(trainer.actor, trainer.processor or trainer.tokenizer, folder / f"{tag}_hf")


def latest_position(args: Any) -> int:
    """Returns the number of prompts consumed before the newest checkpoint; 0 without a checkpoint."""
    return next((int(states.get("consumed_samples", 0)) for _, states in _saved(args)), 0)


def resume(trainer: Any, args: Any, consumed_samples: int) -> Mapping[str, Any]:
    """Returns the `client_states` of the newest checkpoint with this number of consumed prompts, or {}.

    If the trainer has a moving average, also loads it and the actor's weights.
    """
    for tag, states in _saved(args):
        if states.get("consumed_samples") == consumed_samples:
            if trainer.ema_model is not None:
                folder, ema = Path(args.ckpt_path) / _ACTOR, trainer.ema_model
                trainer.strategy.load_ckpt(trainer.actor, folder, tag, load_module_only=True, ema_model=ema)
            return states
    return {}


def _saved(args: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (tag, client states) of the actor's checkpoints, newest first."""
    folder = Path(args.ckpt_path) / _ACTOR
    for tag in reversed([*checkpoints(folder)]):
        yield tag, json.loads((folder / tag / "state.json").read_text(encoding="utf-8"))["client_state"]
