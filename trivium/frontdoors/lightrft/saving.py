"""The checkpoints of a trainer, and what it takes from one when it goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trivium.frontdoors.lightrft.arguments import option
from trivium.frontdoors.lightrft.checkpoints import checkpoints

_ACTOR, _CRITIC = "_actor", "_critic"


def save(trainer: Any, args: Any, tag: str, client_states: dict[str, Any]) -> None:
    """`_critic` and `_actor` under `args.ckpt_path`, unless `disable_ds_ckpt`: weights, optimizer, scheduler, of the
    actor also the moving average, and `client_states`; with `save_hf_ckpt` the directory `{tag}_hf`."""
    folder, strategy = Path(args.ckpt_path), trainer.strategy
    limits = (int(option(args, "max_ckpt_num")), option(args, "max_ckpt_mem"))
    if not trainer.disable_ds_ckpt:
        if trainer.critic is not None:
            critic = {"optimizer": trainer.critic_optim, "scheduler": trainer.critic_scheduler}
            strategy.save_ckpt(trainer.critic, folder / _CRITIC, tag, *limits, client_states, **critic)
        # The actor's comes last: where it is complete, the critic's is.
        actor = {"optimizer": trainer.actor_optim, "scheduler": trainer.actor_scheduler}
        actor["ema_model"] = trainer.ema_model
        strategy.save_ckpt(trainer.actor, folder / _ACTOR, tag, *limits, client_states, **actor)
    if trainer.save_hf_ckpt:
        strategy.save_model(trainer.actor, trainer.processor or trainer.tokenizer, folder / f"{tag}_hf")


def latest_position(args: Any) -> int:
    """The prompts that were consumed before the newest checkpoint; 0 where there is none."""
    return next((int(states.get("consumed_samples", 0)) for _, states in _saved(args)), 0)


def resume(trainer: Any, args: Any, consumed_samples: int) -> Mapping[str, Any]:
    """The `client_states` of the newest checkpoint behind so many prompts, and its moving average into the trainer's;
    {} where there is none."""
    for tag, states in _saved(args):
        if states.get("consumed_samples") == consumed_samples:
            if trainer.ema_model is not None:
                folder, ema = Path(args.ckpt_path) / _ACTOR, trainer.ema_model
                trainer.strategy.load_ckpt(trainer.actor, folder, tag, load_module_only=True, ema_model=ema)
            return states
    return {}


def _saved(args: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """(tag, client states) of the actor's checkpoints, the newest first."""
    folder = Path(args.ckpt_path) / _ACTOR
    for tag in reversed([*checkpoints(folder)]):
        yield tag, json.loads((folder / tag / "state.json").read_text(encoding="utf-8"))["client_state"]
