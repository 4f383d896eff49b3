"""Reads the arguments of verl's `main_ppo`, and trains with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trivium.config import read_yaml
from trivium.errors import ConfigError
from trivium.frontdoors.overrides import overridden
from trivium.frontdoors.plain_values import plain, resolved

_DEFAULTS = "ppo_trainer"
"""The config file whose values are the defaults of the table."""
_OPTIONS = {
    "--config-path": "path",
    "-cp": "path",
    "--config-dir": "path",
    "-cd": "path",
    "--config-name": "name",
    "-cn": "name",
}


def config_of(arguments: Sequence[str]) -> dict[str, Any]:
    """Builds a config in verl's layout from overrides and the file of `--config-path DIR --config-name NAME`, if given.

    Raises ConfigError for unsupported options of Hydra, for a missing file, and for invalid overrides.
    """
    options, overrides = _separated(arguments)
    name = options.get("name", _DEFAULTS).removesuffix(".yaml")
    base: dict[str, Any] = {}
    if "path" in options:
        base = read_yaml(Path(options["path"]).expanduser() / f"{name}.yaml")
    elif name != _DEFAULTS:
        do = f"leave it out, or name the folder of {name}.yaml with --config-path"
        raise ConfigError(f"the config {name!r}", f"{_DEFAULTS} alone is known by its name", do)
    return resolved(plain(overridden(base, overrides)))


def _separated(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Separates arguments into options, by the setting that they change, and overrides."""
    rest, options, overrides = list(arguments), dict[str, str](), list[str]()
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("-"):
            overrides.append(argument)
            continue
        name, equals, value = argument.partition("=")
        if name not in _OPTIONS or not (equals or rest):
            do = f"write section.key=value; there are the options {', '.join(_OPTIONS)} with a value"
            raise ConfigError(f"the option {argument}", "it is not one of those that are known", do)
        options[_OPTIONS[name]] = (value if equals else rest.pop(0)).strip("'\"")
    return options, overrides


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Trains with a config in verl's layout, like verl's `main_ppo`, and returns the summary of the run.

    Tokenizer and processor come from the model, data and rewards from the config. All workers share one pool of
    `trainer.nnodes` times `trainer.n_gpus_per_node` processes. Raises the errors of RayPPOTrainer.
    """
    from trivium.frontdoors.verl.model_workers import ActorRolloutRefWorker, CriticWorker, RewardModelWorker
    from trivium.frontdoors.verl.resource_pools import Role
    from trivium.frontdoors.verl.trainer import RayPPOTrainer
    from trivium.frontdoors.verl.translation import settings_of
    from trivium.text import hf_processor, hf_tokenizer

    verl = settings_of(config)
    model = verl["actor_rollout_ref.model.path"]
    if not model:
        raise ConfigError("actor_rollout_ref.model.path", "nothing", "name a Hugging Face directory")
    roles: dict[Role, Any] = {
        Role.ActorRollout: ActorRolloutRefWorker,
        Role.Critic: CriticWorker,
        Role.RefPolicy: ActorRolloutRefWorker,
    }
    if verl["reward_model.enable"]:
        roles[Role.RewardModel] = RewardModelWorker
    trainer = RayPPOTrainer(config, hf_tokenizer(model), roles, None, processor=hf_processor(model))
    try:
        trainer.init_workers()
        return trainer.fit()
    finally:
        trainer.shutdown()
