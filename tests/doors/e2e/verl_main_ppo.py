"""A launch script in the shape of verl's `main_ppo` (v0.7.0). Its import lines differ, as the names come from
`trivium.frontdoors.verl`, and the line that reads the config. Neither verl nor Hydra has to be installed."""

from __future__ import annotations

import sys
from typing import Any

import ray
from omegaconf import OmegaConf

from trivium.frontdoors.verl import (
    AsyncActorRolloutRefWorker,
    CriticWorker,
    RayPPOTrainer,
    RayWorkerGroup,
    ResourcePoolManager,
    RewardModelWorker,
    Role,
    auto_set_device,
    collate_fn,
    config_of,
    copy_to_local,
    create_rl_dataset,
    create_rl_sampler,
    get_ppo_ray_runtime_env,
    hf_processor,
    hf_tokenizer,
    load_reward_manager,
    need_critic,
    need_reference_policy,
    validate_config,
    with_defaults,
)


def main() -> None:
    config = with_defaults(config_of(sys.argv[1:]))
    auto_set_device(config)
    run_ppo(config)


def run_ppo(config: Any) -> None:
    if not ray.is_initialized():
        given = config.ray_kwargs.get("ray_init", {})
        runtime_env = OmegaConf.merge(get_ppo_ray_runtime_env(), given.get("runtime_env", {}))
        arguments = OmegaConf.create({**given, "runtime_env": runtime_env})
        ray.init(**OmegaConf.to_container(arguments))
    runner = ray.remote(num_cpus=1)(TaskRunner).remote()
    ray.get(runner.run.remote(config))


class TaskRunner:
    def __init__(self) -> None:
        self.role_worker_mapping: dict[Any, Any] = {}
        self.mapping: dict[Any, str] = {}

    def add(self, role: Role, worker: Any) -> None:
        self.role_worker_mapping[role] = ray.remote(worker)
        self.mapping[role] = "global_pool"

    def run(self, config: Any) -> None:
        OmegaConf.resolve(config)
        assert config.actor_rollout_ref.actor.strategy in {"fsdp", "fsdp2"}
        self.add(Role.ActorRollout, AsyncActorRolloutRefWorker)
        self.add(Role.Critic, CriticWorker)
        if config.reward_model.enable:
            self.add(Role.RewardModel, RewardModelWorker)
        if config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss:
            self.add(Role.RefPolicy, AsyncActorRolloutRefWorker)
        validate_config(
            config=config,
            use_reference_policy=need_reference_policy(self.role_worker_mapping),
            use_critic=need_critic(config),
        )
        local_path = copy_to_local(
            config.actor_rollout_ref.model.path, use_shm=config.actor_rollout_ref.model.get("use_shm", False)
        )
        trust_remote_code = config.data.get("trust_remote_code", False)
        tokenizer = hf_tokenizer(local_path, trust_remote_code=trust_remote_code)
        processor = hf_processor(local_path, trust_remote_code=trust_remote_code, use_fast=True)
        kwargs = config.reward_model.get("reward_kwargs", {})
        reward_fn = load_reward_manager(config, tokenizer, num_examine=0, **kwargs)
        val_reward_fn = load_reward_manager(config, tokenizer, num_examine=1, **kwargs)
        pools = ResourcePoolManager(
            resource_pool_spec={"global_pool": [config.trainer.n_gpus_per_node] * config.trainer.nnodes},
            mapping=self.mapping,
        )
        train_dataset, val_dataset = (
            create_rl_dataset(
                config.data[f"{split}_files"],
                config.data,
                tokenizer,
                processor,
                is_train=split == "train",
                max_samples=config.data.get(f"{split}_max_samples", -1),
            )
            for split in ("train", "val")
        )
        trainer = RayPPOTrainer(
            config=config,
            tokenizer=tokenizer,
            processor=processor,
            role_worker_mapping=self.role_worker_mapping,
            resource_pool_manager=pools,
            ray_worker_group_cls=RayWorkerGroup,
            reward_fn=reward_fn,
            val_reward_fn=val_reward_fn,
            train_dataset=train_dataset,
            val_dataset=val_dataset,
            collate_fn=collate_fn,
            train_sampler=create_rl_sampler(config.data, train_dataset),
        )
        trainer.init_workers()
        trainer.fit()


if __name__ == "__main__":
    main()
