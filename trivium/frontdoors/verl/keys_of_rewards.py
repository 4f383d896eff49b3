"""The keys of rewards in verl's config: managers, scorers and the reward model."""

from __future__ import annotations

from trivium.frontdoors.tables import Entry, Ignored, Mapped, Restricted, ignored
from trivium.frontdoors.verl.keys_of_models import CUT, OFF

MANAGER: dict[str, Entry] = {
    "reward_manager": Mapped("rewards.load_reward_manager, where no reward_fn is passed: its name"),
    "reward_manager.name": Mapped("rewards.load_reward_manager: the manager's name"),
    "reward_manager.source": Restricted((None, "register", "importlib"), "set register, or importlib and module.path"),
    "reward_manager.module.path": Mapped("rewards.load_reward_manager: the manager's file or package"),
    "reward_manager.module.name": Ignored("modules go by their paths"),
}

SANDBOX: dict[str, Entry] = {
    "url": Restricted((None, ""), "programs run in a sandbox on this machine (docs/extend-rewards.md): leave it out"),
    "max_concurrent": Ignored("programs run on this machine, reward_kwargs.workers at a time"),
}

WHOLE = "the reward model is whole on every rank"

REWARD_MODEL: dict[str, Entry] = {
    "enable": Mapped("whether Role.RewardModel must be mapped", False),
    "strategy": Restricted((None, "fsdp", "fsdp2"), "Megatron is not built here: use strategy fsdp2"),
    "model.path": Mapped("the model of Role.RewardModel"),
    "model.input_tokenizer": Mapped("the reward model reads the policy's tokens: the actor's path, or refused"),
    "model.use_shm": Restricted(OFF, "leave it out"),
    "model.external_lib": Restricted((None,), "import it in your script"),
    "model.override_config": Restricted((None, {}), "change config.json of the model"),
    "model.trust_remote_code": Restricted(OFF, "use a model class that transformers ships"),
    "model.use_remove_padding": Ignored("sequences are always packed"),
    "model.use_fused_kernels": Ignored("a reward model makes no logits"),
    "megatron": Ignored("Megatron is not built here; reward_model.strategy must be fsdp or fsdp2"),
    "max_length": Restricted((None,), "leave it out: the reward model reads whole sequences"),
    "reward_kwargs": Mapped("what the reward manager is built with", {}),
    "reward_loop_source": Restricted((None, "register"), "set reward_model.reward_manager"),
    "reward_loop_module_path": Restricted((None,), "set reward_model.reward_manager"),
    "reward_loop_class_name": Restricted((None,), "set reward_model.reward_manager"),
    "use_reward_loop": Ignored("rewards are the reward manager's, one way"),
    "launch_reward_fn_async": Ignored("rewards are always made in a thread of their own"),
    "num_workers": Ignored("reward_kwargs.workers is the number of processes that score"),
    "enable_resource_pool": Restricted(OFF, "give Role.RewardModel a pool of its own in resource_pool_manager"),
    "n_gpus_per_node": Ignored("the resource_pool_manager places it"),
    "nnodes": Ignored("the resource_pool_manager places it"),
    "rollout": Ignored("a reward model scores, and samples nothing"),
    "profiler": Ignored("phases are timed in every step"),
    "ulysses_sequence_parallel_size": Ignored(WHOLE),
    **ignored(
        CUT,
        "micro_batch_size micro_batch_size_per_gpu use_dynamic_bsz forward_max_token_len_per_gpu",
    ),
    **MANAGER,
}
