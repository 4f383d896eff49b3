"""The keys of rewards in verl's config: managers, scorers and the reward model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from trivium.frontdoors.tables import Entry, Ignored, Mapped, Moved, Restricted, ignored, under
from trivium.frontdoors.verl.config.keys_of_models import CUT

_MANAGER: dict[str, Entry] = {
    "name": Mapped("name of the reward manager, if no reward_fn is passed", "naive"),
    "source": Restricted(
        (None, "register", "importlib"), "set register, or importlib and module.path", default="register"
    ),
    "module.path": Mapped("file or package of the reward manager", type=Path),
    "module.name": Ignored("modules are found by their path"),
}

_SANDBOX: dict[str, Entry] = {
    "url": Ignored("programs run in a sandbox on this machine (docs/extend-rewards.md)"),
    "max_concurrent": Ignored("programs run on this machine, reward_kwargs.workers at a time"),
    "memory_limit_mb": Mapped("memory limit of a program, in MiB", 1024),
}

_SCORER: dict[str, Entry] = {
    "path": Mapped("file of the scoring function, if no reward_fn is passed", type=Path),
    "name": Mapped("name of the scoring function in that file", "compute_score"),
    "reward_kwargs": Mapped("further arguments of the scoring function", type=dict),
}


def _moved(prefix: str, entries: Iterable[str], to: str) -> dict[str, Entry]:
    """Returns the keys of a section that has another path in another version of verl."""
    return {f"{prefix}.{name}": Moved(f"{to}.{name}") for name in entries}


WHOLE = "every rank holds the whole reward model"
_TYPE = Restricted((None, "auto", "fp32", "float32", "bf16", "bfloat16"), "set float32, bfloat16 or auto")
REWARD_MODEL_TYPES: dict[str, Entry] = dict.fromkeys(
    (
        "model.fsdp_config.model_dtype",
        "model.fsdp_config.dtype",
        "model.fsdp_config.mixed_precision.param_dtype",
        "rollout.dtype",
    ),
    _TYPE,
)
"""The keys, of any version, for the dtype of the reward model. The first one that is set is used."""

_SAMPLES_NOTHING = "reward models that generate text are not supported here"

_REWARD_MODEL: dict[str, Entry] = {
    "enable": Mapped("whether Role.RewardModel must be mapped", False),
    "strategy": Restricted((None, "fsdp", "fsdp2"), "Megatron is not supported: use strategy fsdp2"),
    "model.path": Mapped("the model of Role.RewardModel", type=Path),
    "model.input_tokenizer": Mapped("must be the actor's path: the reward model reads the policy's tokens", type=Path),
    "model.use_shm": Ignored("it only copies files"),
    "model.external_lib": Restricted((None,), "import it in your script"),
    "model.override_config": Restricted(({},), "change config.json of the model"),
    "model.trust_remote_code": Ignored("no code of a model repository is run; a model that needs it is refused"),
    "model.use_remove_padding": Ignored("sequences are always packed"),
    "model.use_fused_kernels": Ignored("a reward model computes no logits"),
    "megatron": Ignored("Megatron is not supported; reward_model.strategy must be fsdp or fsdp2"),
    "max_length": Restricted((None,), "leave it out: the reward model reads whole sequences"),
    "reward_kwargs": Mapped("arguments of the reward manager's constructor", {}),
    "overlong_buffer": Mapped("reward_kwargs.overlong_buffer_cfg; max_resp_len is data.max_response_length", {}),
    "reward_loop_source": Moved("reward_manager.source"),
    "reward_loop_module_path": Moved("reward_manager.module.path"),
    "reward_loop_class_name": Moved("reward_manager.name"),
    "use_reward_loop": Ignored("the reward manager computes all rewards"),
    "launch_reward_fn_async": Ignored("rewards are always computed in a separate thread"),
    "num_workers": Ignored("reward_kwargs.workers is the number of processes that score"),
    "enable_resource_pool": Ignored("resource_pool_manager places it"),
    "n_gpus_per_node": Ignored("resource_pool_manager places it"),
    "nnodes": Ignored("resource_pool_manager places it"),
    "rollout": Ignored(_SAMPLES_NOTHING),
    "profiler": Ignored("the phases of every step are timed"),
    "ulysses_sequence_parallel_size": Ignored(WHOLE),
    **ignored(
        CUT,
        "micro_batch_size micro_batch_size_per_gpu use_dynamic_bsz forward_max_token_len_per_gpu",
    ),
}

REWARDS: dict[str, Entry] = {
    **under("reward_model", _REWARD_MODEL),
    **under("reward_manager", _MANAGER),
    # Text in some versions of verl, a section in others.
    "reward_manager": Moved("reward_manager.name"),
    "reward_model.reward_manager": Moved("reward_manager.name"),
    **_moved("reward_model.reward_manager", _MANAGER, "reward_manager"),
    **_moved("reward.reward_manager", _MANAGER, "reward_manager"),
    **under("custom_reward_function", _SCORER),
    **_moved("reward.custom_reward_function", _SCORER, "custom_reward_function"),
    **under("reward_model.sandbox_fusion", _SANDBOX),
    **_moved("reward.sandbox_fusion", _SANDBOX, "reward_model.sandbox_fusion"),
    **_moved("sandbox_fusion", _SANDBOX, "reward_model.sandbox_fusion"),
    "reward.reward_kwargs": Moved("reward_model.reward_kwargs"),
    "reward.num_workers": Moved("reward_model.num_workers"),
    "reward.reward_model.model_path": Moved("reward_model.model.path"),
    **_moved(
        "reward.reward_model",
        ("enable", "enable_resource_pool", "n_gpus_per_node", "nnodes", "rollout.dtype"),
        "reward_model",
    ),
    "reward.reward_model.rollout": Ignored(_SAMPLES_NOTHING),
}
