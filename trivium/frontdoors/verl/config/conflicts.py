"""Keys of verl's config that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trivium.config.reading import read_bounded
from trivium.foundation.errors import Problem
from trivium.frontdoors.tables import Settings

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def conflicts(verl: Settings, has_validation: bool, engine: str) -> Iterator[Problem]:
    """Yields problems for keys that contradict each other, and for keys that need another key. `engine` is the kind of
    the rollout engine."""
    mini_key = f"{ACTOR}.ppo_mini_batch_size"
    batch, mini = verl["data.train_batch_size"], verl[mini_key]
    # The default, 256, may exceed a small batch, which is then one mini-batch.
    if mini != verl.table.default_of(mini_key) and (mini > batch or batch % mini):
        yield Problem(
            mini_key,
            f"mini-batches of {mini} prompts",
            f"a step has {batch} (data.train_batch_size)",
            "make it a divisor of data.train_batch_size",
        )
    if verl["data.gen_batch_size"] not in (None, batch) and not verl["algorithm.filter_groups.enable"]:
        yield Problem(
            "data.gen_batch_size",
            repr(verl["data.gen_batch_size"]),
            f"a step has {batch} prompts (data.train_batch_size)",
            "leave it out, or set algorithm.filter_groups.enable",
        )
    # Hydra's list of config files names the backend.
    if "megatron" in str(verl.values.get("defaults")):
        yield Problem("defaults", str(verl.values["defaults"]), "Megatron is not supported", "use the FSDP configs")
    top_p = verl[f"{ROLLOUT}.top_p"]
    if engine == "vllm" and top_p != 1 and verl[f"{ROLLOUT}.top_k"] in (-1, 0):
        cause = "the trainer computes probabilities over the tokens that vLLM kept, which it lists up to top_k of them"
        do = "set rollout.top_k, too, leave it out (val_kwargs may set it), or set rollout.name: torch"
        yield Problem(f"{ROLLOUT}.top_p", f"top_p = {top_p} in training", cause, do)
    yield from _critic_conflicts(verl)
    yield from _model_conflicts(verl)
    yield from _trainer_conflicts(verl, has_validation)


def _model_conflicts(verl: Settings) -> Iterator[Problem]:
    for section in ("actor_rollout_ref.model", "critic.model", "reward_model.model"):
        described = Path(verl[f"{section}.path"] or "") / "config.json"
        if verl[f"{section}.trust_remote_code"] and described.is_file() and '"auto_map"' in read_bounded(described):
            cause = f"{described} names code of its own (auto_map), which is not run"
            do = "use a model class that transformers ships, or leave this out"
            yield Problem(f"{section}.trust_remote_code", "True", cause, do)
    path = verl["actor_rollout_ref.model.path"]
    has_critic = verl["algorithm.adv_estimator"] == "gae"
    if not path:
        yield Problem("actor_rollout_ref.model.path", "a model", "nothing", "name a Hugging Face directory")
    if verl.has("critic.enable") and bool(verl["critic.enable"]) != has_critic:
        yield Problem(
            "critic.enable",
            repr(verl["critic.enable"]),
            f"adv_estimator is {verl['algorithm.adv_estimator']!r}",
            "leave it out: a critic is trained if the estimator reads values (gae)",
        )
    tokenizer = verl["reward_model.model.input_tokenizer"]
    if tokenizer not in (None, path):
        yield Problem(
            "reward_model.model.input_tokenizer",
            repr(tokenizer),
            f"the actor's model is {path!r}",
            "name the actor's model, or leave it out: the reward model reads the policy's tokens",
        )


def _trainer_conflicts(verl: Settings, has_validation: bool) -> Iterator[Problem]:
    mode = verl["trainer.resume_mode"]
    if mode not in ("auto", "disable", "resume_path"):
        yield Problem("trainer.resume_mode", repr(mode), "no such mode", "use auto, disable or resume_path")
    elif mode == "resume_path" and not verl.has("trainer.resume_from_path"):
        yield Problem(
            "trainer.resume_from_path",
            repr(verl["trainer.resume_from_path"]),
            f"resume_mode is {mode!r}",
            "set both: resume_mode: resume_path, and the checkpoint's directory",
        )
    if verl["trainer.val_only"] and not has_validation:
        do = "name data.val_files, or pass val_dataset"
        yield Problem("trainer.val_only", "True", "there is no validation set", do)
    keeps = {verl.values.get(f"trainer.max_{role}_ckpt_to_keep") for role in ("actor", "critic")} - {None}
    if len(keeps) > 1:
        yield Problem(
            "trainer.max_critic_ckpt_to_keep",
            "another number than the actor's",
            "a checkpoint holds both",
            "set only max_actor_ckpt_to_keep",
        )


def _critic_conflicts(verl: Settings) -> Iterator[Problem]:
    """Yields problems for keys of the critic, if one is trained."""
    if verl["algorithm.adv_estimator"] != "gae":
        return
    name = "ulysses_sequence_parallel_size"
    actor, critic = verl.first(f"{ACTOR}.{name}", f"{ACTOR}.fsdp_config.{name}"), verl.values.get(f"critic.{name}")
    if critic not in (None, actor):
        yield Problem(
            f"critic.{name}", repr(critic), f"the actor has {actor!r}", "leave it out: the critic follows the actor"
        )
    mini, batch = verl["critic.ppo_mini_batch_size"], verl["data.train_batch_size"]
    if mini not in (None, verl[f"{ACTOR}.ppo_mini_batch_size"]) and (mini > batch or batch % mini):
        cause = f"a step has {batch} (data.train_batch_size)"
        do = "make it a divisor of data.train_batch_size"
        yield Problem("critic.ppo_mini_batch_size", f"mini-batches of {mini} prompts", cause, do)
