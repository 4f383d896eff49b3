"""verl's entry point: reads the arguments of `main_ppo`, and trains with them.

`run_ppo(config)` and `TaskRunner` are those of scripts that import them from verl.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trivium.config import read_yaml
from trivium.foundation.errors import ConfigError
from trivium.frontdoors.overrides import overridden
from trivium.frontdoors.plain_values import container_of, escaped, plain, resolved
from trivium.frontdoors.verl.config.config_table import TABLE

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

    Raises ConfigError for unsupported options of Hydra, for a missing file, and for invalid overrides; MissingPackage
    for overrides without OmegaConf.
    """
    options, overrides = _separated(arguments)
    name = options.get("name", _DEFAULTS).removesuffix(".yaml")
    base: dict[str, Any] = {}
    if "path" in options:
        base = read_yaml(Path(options["path"]).expanduser() / f"{name}.yaml")
    elif name != _DEFAULTS:
        do = f"leave it out, or name the folder of {name}.yaml with --config-path"
        raise ConfigError(f"the config {name!r}", f"only {_DEFAULTS} needs no folder", do)
    return resolved(plain(overridden(base, overrides)))


def _separated(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Separates arguments into options, by the setting that they change, and overrides."""
    rest, options, overrides = list(arguments), dict[str, str](), list[str]()
    while rest:
        argument = rest.pop(0)
        if not argument.strip():  # a shell variable without a value
            continue
        if not argument.startswith("-"):
            overrides.append(argument)
            continue
        name, equals, value = argument.partition("=")
        if name not in _OPTIONS or not (equals or rest):
            do = f"write section.key=value; the options are {', '.join(_OPTIONS)}, each with a value"
            raise ConfigError(f"the option {argument}", "no such option", do)
        options[_OPTIONS[name]] = (value if equals else rest.pop(0)).strip("'\"")
    return options, overrides


def with_defaults(config: Mapping[str, Any]) -> Any:
    """Returns a config with verl's default for every key that it does not set, as a DictConfig of OmegaConf."""
    verl = TABLE.read(config)
    names = dict.fromkeys(key.partition(".")[0] for key in TABLE.entries)
    defaults = {name: verl.section(name) for name in names if any(key.startswith(f"{name}.") for key in TABLE.entries)}
    base = _under(_SWITCHES, escaped(defaults))
    return container_of(_under(base, resolved(plain(config))), "a config with verl's defaults")


_SWITCHES: dict[str, Any] = {
    "actor_rollout_ref": {"actor": {"strategy": "fsdp"}},
    "critic": {"strategy": "fsdp"},
    "reward_model": {"strategy": "fsdp"},
    "transfer_queue": {"enable": False},
    "global_profiler": {"tool": None, "steps": None},
    "ray_kwargs": {"ray_init": {}, "timeline_json_file": None},
}
"""Keys that verl's scripts read, and that have no default in the table."""


def _under(base: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config, with the values of `base` for keys that it does not have, or whose value is null."""
    merged = {**base, **{key: value for key, value in config.items() if value is not None or key not in base}}
    for key in base.keys() & config.keys():
        if isinstance(base[key], dict) and isinstance(config[key], dict):
            merged[key] = _under(base[key], config[key])
    return merged


def run_ppo(config: Any, task_runner_class: Any = None) -> Any:
    """Trains with a config in verl's layout. `task_runner_class` is a class with `run(config)`, plain or decorated with
    `ray.remote`, which then runs in a process of its own; TaskRunner by default. Returns the result of `run`."""
    if not hasattr(task_runner_class, "remote"):
        return (task_runner_class or TaskRunner)().run(config)
    import ray

    from trivium.cluster.session import connect
    from trivium.frontdoors.verl.translation import settings_of

    verl = settings_of(config)
    connect(verl["ray_kwargs"] or {}, verl["ray_init"] or {})
    return ray.get(task_runner_class.remote().run.remote(config))


class TaskRunner:
    """Maps the workers of every role and trains. A subclass may override any method.

    `role_worker_mapping` and `mapping` assign worker classes and pools to roles.
    """

    def __init__(self) -> None:
        self.role_worker_mapping: dict[Any, Any] = {}
        self.mapping: dict[Any, str] = {}

    def add_actor_rollout_worker(self, config: Any) -> tuple[Any, Any]:
        """Maps the policy's workers, and returns (their class, the class of their group)."""
        # The methods import Ray and torch, which reading the arguments of a script needs not.
        from trivium.frontdoors.verl.objects.resource_pools import Role
        from trivium.frontdoors.verl.objects.workers.model_workers import ActorRolloutRefWorker
        from trivium.frontdoors.verl.objects.workers.worker_group import RayWorkerGroup

        self._map(Role.ActorRollout, ActorRolloutRefWorker)
        return ActorRolloutRefWorker, RayWorkerGroup

    def add_critic_worker(self, config: Any) -> None:
        """Maps the critic's workers, if the config needs a critic."""
        from trivium.frontdoors.verl.objects.resource_pools import Role
        from trivium.frontdoors.verl.objects.workers.model_workers import CriticWorker

        if need_critic(config):
            self._map(Role.Critic, CriticWorker)

    def add_reward_model_worker(self, config: Any) -> None:
        """Maps the reward model's workers, if the config enables one."""
        from trivium.frontdoors.verl.objects.resource_pools import Role
        from trivium.frontdoors.verl.objects.workers.model_workers import RewardModelWorker

        if need_reward_model(config):
            self._map(Role.RewardModel, RewardModelWorker)

    def add_ref_policy_worker(self, config: Any, ref_policy_cls: Any) -> None:
        """Maps the reference's workers, if the config has a KL penalty."""
        from trivium.frontdoors.verl.objects.resource_pools import Role

        if need_reference_policy(config):
            self._map(Role.RefPolicy, ref_policy_cls)

    def init_resource_pool_mgr(self, config: Any) -> Any:
        """Returns the manager of one pool for all roles, `trainer.nnodes` times `trainer.n_gpus_per_node`."""
        from trivium.frontdoors.verl.objects.resource_pools import ResourcePoolManager
        from trivium.frontdoors.verl.translation import settings_of

        verl = settings_of(config)
        counts = [verl["trainer.n_gpus_per_node"]] * verl["trainer.nnodes"]
        device = "cpu" if verl["trainer.device"] == "cpu" else None
        return ResourcePoolManager({"global_pool": counts}, self.mapping, device_name=device)

    def run(self, config: Any) -> dict[str, Any]:
        """Trains and returns the summary of the run. Tokenizer and processor come from the model, data and rewards from
        the config. Raises the errors of RayPPOTrainer."""
        from trivium.frontdoors.verl.objects.trainer import RayPPOTrainer
        from trivium.frontdoors.verl.translation import settings_of
        from trivium.text import hf_processor, hf_tokenizer

        model = settings_of(config)["actor_rollout_ref.model.path"]
        if not model:
            raise ConfigError("actor_rollout_ref.model.path", "nothing", "name a Hugging Face directory")
        worker, group_class = self.add_actor_rollout_worker(config)
        self.add_critic_worker(config)
        self.add_reward_model_worker(config)
        self.add_ref_policy_worker(config, worker)
        pools, tokenizer = self.init_resource_pool_mgr(config), hf_tokenizer(model)
        roles, processor = self.role_worker_mapping, hf_processor(model)
        trainer = RayPPOTrainer(config, tokenizer, roles, pools, group_class, processor=processor)
        try:
            trainer.init_workers()
            return trainer.fit()
        finally:
            trainer.shutdown()

    def _map(self, role: Any, worker: Any) -> None:
        self.role_worker_mapping[role], self.mapping[role] = worker, "global_pool"


# --------------------------------------------------------------------------- what a config needs


def need_critic(config: Any) -> bool:
    """Whether a config trains a critic: `critic.enable` if it is set, else whether the estimator reads values."""
    verl = TABLE.read(config)
    enabled = verl.values.get("critic.enable")
    return verl["algorithm.adv_estimator"] == "gae" if enabled is None else bool(enabled)


def need_reference_policy(config: Any) -> bool:
    """Whether a config has a KL penalty, or whether a mapping of roles to workers has a reference."""
    if (roles := _roles(config)) is not None:
        return bool({"RefPolicy", "ActorRolloutRef"} & roles)
    verl = TABLE.read(config)
    return bool(verl["algorithm.use_kl_in_reward"] or verl["actor_rollout_ref.actor.use_kl_loss"])


def need_reward_model(config: Any) -> bool:
    """Whether a config enables a reward model, or whether a mapping of roles to workers has one."""
    if (roles := _roles(config)) is not None:
        return "RewardModel" in roles
    return bool(TABLE.read(config)["reward_model.enable"])


def validate_config(config: Any, use_reference_policy: bool = False, use_critic: bool = False) -> None:
    """Raises ConfigError with all keys of a config that cannot be used."""
    from trivium.frontdoors.verl.translation import settings_of, translated

    verl = settings_of(config)
    if use_critic and not need_critic(config):
        cause = f"algorithm.adv_estimator {verl['algorithm.adv_estimator']!r} reads no values"
        raise ConfigError("use_critic=True", cause, "use gae, or leave the critic out")
    if use_reference_policy and not need_reference_policy(config):
        do = "set algorithm.use_kl_in_reward or actor_rollout_ref.actor.use_kl_loss"
        raise ConfigError("use_reference_policy=True", "no KL penalty reads a reference", do)
    translated(verl, rows=verl["data.train_batch_size"], has_validation=bool(verl["data.val_files"]), device="cpu")


def _roles(value: Any) -> set[str] | None:
    """Returns the names of the roles in a mapping of roles to workers; None for a config."""
    if not isinstance(value, Mapping) or not value or not all(hasattr(key, "name") for key in value):
        return None
    return {key.name for key in value}
