"""Each fact of verl's trainer documentation, once, in our own words: by what the door has and does, or refuses.

A fact that another test shows names that test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from api_documents import check_parameters, shown_by
from failing import refused
from torch.utils.data import Dataset, Sampler
from transformers import PreTrainedTokenizerBase

from trivium.foundation.errors import ConfigError, TriviumError, UnknownName
from trivium.text.tiny import TinyModel, tiny_tokenizer

pytest.importorskip("ray")

import ray

from trivium.frontdoors.verl import (
    AbstractRewardManager,
    ActorRolloutRefWorker,
    BatchView,
    CriticWorker,
    DAPORewardManager,
    NaiveRewardManager,
    RayPPOTrainer,
    RayWorkerGroup,
    ResourcePoolManager,
    Role,
    Worker,
    agg_loss,
    compute_policy_loss,
    compute_reward,
    core_algos,
    hf_tokenizer,
    kl_penalty,
    load_reward_manager,
)
from trivium.frontdoors.verl.config.config_table import TABLE

MANAGERS, TRANSLATION = (f"doors/verl/test_frontdoor_{name}.py" for name in ("reward_managers", "translation"))
DOOR, GROUPS = "doors/e2e/test_verl_door.py", "doors/e2e/test_worker_group.py"


class Rows(Dataset[Any]):
    """Two rows of the RLHF schema."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{index}+0="}],
            "reward_model": {"style": "rule", "ground_truth": str(index)},
            "extra_info": {"index": index},
        }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = TinyModel.Config(alphabet="0123456789+=", layers=1, hidden=8, heads=1, mlp=8, max_position=64)
    return str(TinyModel(config, seed=0).materialize(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture
def built(model: str, tmp_path: Path) -> Callable[..., RayPPOTrainer]:
    """Builds a trainer without starting a process. `estimator` is the only key of the config that tests change."""

    def build(kind: type[RayPPOTrainer] = RayPPOTrainer, estimator: str = "grpo", **given: Any) -> RayPPOTrainer:
        config: dict[str, Any] = {
            "data": {"train_batch_size": 2, "max_prompt_length": 8, "max_response_length": 4, "shuffle": False},
            "algorithm": {"adv_estimator": estimator},
            "actor_rollout_ref": {
                "model": {"path": model},
                "actor": {"ppo_mini_batch_size": 2},
                "rollout": {"name": "torch", "n": 2},
            },
            "critic": {"model": {"path": model}},
            "trainer": {
                "logger": ["console"],
                "default_local_dir": str(tmp_path / "run"),
                "total_training_steps": 1,
                "n_gpus_per_node": 3,
            },
        }
        arguments: dict[str, Any] = {
            "config": config,
            "tokenizer": hf_tokenizer(model),
            "role_worker_mapping": {Role.ActorRollout: ActorRolloutRefWorker},
            "resource_pool_manager": None,
            "reward_fn": one,
            "train_dataset": Rows(),
            "device_name": "cpu",
        }
        return kind(**{**arguments, **given})

    return build


def one(data: BatchView, return_dict: bool = False) -> Any:
    rewards = torch.ones(data.batch["responses"].shape)
    return {"reward_tensor": rewards, "reward_extra_info": {}} if return_dict else rewards


def two(data: BatchView, return_dict: bool = False) -> Any:
    rewards = one(data) * 2
    return {"reward_tensor": rewards, "reward_extra_info": {}} if return_dict else rewards


def view(validate: bool = False, width: int = 4) -> BatchView:
    """A response of 3 of `width` tokens, `2`, to `1+1=`."""
    tokenizer = tiny_tokenizer()
    ends = [tokenizer.eos_token_id] * 2
    responses = torch.tensor([[*tokenizer.encode("2", add_special_tokens=False), *ends, *ends]])[:, :width]
    prompts = torch.tensor([tokenizer.encode("1+1=", add_special_tokens=False)])
    attention = torch.ones(1, prompts.shape[1] + width, dtype=torch.long)
    attention[:, prompts.shape[1] + 3 :] = 0
    columns = {
        "data_source": ["openai/gsm8k"],
        "reward_model": [{"style": "rule", "ground_truth": "2"}],
        "uid": ["a"],
    }
    tensors = {"prompts": prompts, "responses": responses, "attention_mask": attention}
    return BatchView.from_dict(tensors, columns, {"validate": validate})


# --------------------------------------------------------------------------- signatures

MANAGER = "tokenizer, num_examine, compute_score=None, reward_fn_key='data_source'"
SIGNATURES: dict[Callable[..., Any], str] = {
    RayPPOTrainer: "config, tokenizer, role_worker_mapping, resource_pool_manager, "
    f"ray_worker_group_cls={RayWorkerGroup!r}, processor=None, reward_fn=None, val_reward_fn=None, train_dataset=None, "
    "val_dataset=None, collate_fn=None, train_sampler=None, device_name=None",
    RayPPOTrainer.fit: "",
    RayPPOTrainer.init_workers: "",
    hf_tokenizer: "name_or_path, correct_pad_token=True, correct_gemma2=True",
    agg_loss: "loss_mat, loss_mask, loss_agg_mode",
    compute_policy_loss: "old_log_prob, log_prob, advantages, response_mask, cliprange=None, cliprange_low=None, "
    "cliprange_high=None, clip_ratio_c=3.0, loss_agg_mode='token-mean'",
    kl_penalty: "logprob, ref_logprob, kl_penalty",
    compute_reward: "data, reward_fn",
    load_reward_manager: "config, tokenizer, num_examine=0",  # verl has no default: its calls pass it
    NaiveRewardManager: MANAGER,
    DAPORewardManager: f"{MANAGER}, max_resp_len=None, overlong_buffer_cfg=None",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__qualname__)
def test_the_parameters_of(function: Callable[..., Any]) -> None:
    check_parameters(function, SIGNATURES[function])


# --------------------------------------------------------------------------- behaviour

Build = Callable[..., RayPPOTrainer]
ONES = torch.ones(2, 3)
MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])


class Mine(RayPPOTrainer):
    """A trainer of a user."""

    def _create_dataloader(self, *given: Any, **named: Any) -> None:
        super()._create_dataloader(*given, **named)
        self.has_own_data = True


class MyGroup(RayWorkerGroup):
    """A group class of a user."""


class MyActor(ActorRolloutRefWorker):
    """A worker class of a user."""


class Backwards(Sampler[int]):
    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Any:
        return reversed(range(len(self.rows)))


def starts_nothing(build: Build, model: str) -> bool:
    trainer = build()
    return not ray.is_initialized() and not Path(trainer.run_config.run.dir).exists()


def needs_a_critic(build: Build) -> bool:
    with refused(ConfigError, "Critic"):
        build(estimator="gae")
    roles = {Role.ActorRollout: ActorRolloutRefWorker, Role.Critic: CriticWorker}
    return build(estimator="gae", role_worker_mapping=roles).use_critic


def asks_for_workers(build: Build) -> bool:
    trainer = build()
    with pytest.raises(TriviumError) as caught:
        trainer.fit()
    return "init_workers" in str(caught.value)


def needs_a_gpu_for_cuda(build: Build) -> bool:
    if torch.cuda.is_available():
        return build(device_name="cuda").device_name == "cuda"
    with refused(ConfigError, "cuda"):
        build(device_name="cuda")
    return True


def rewards_of(build: Build, validate: bool) -> float:
    trainer = build(val_reward_fn=two, val_dataset=Rows())
    return float(trainer._compute_reward(view(validate))[0].mean())


def unsupported(strategy: str) -> bool:
    problems = TABLE.read({"actor_rollout_ref": {"actor": {"strategy": strategy}}}).problems
    return [problem.where for problem in problems] == ["actor_rollout_ref.actor.strategy"]


def clipped(advantage: float, **options: Any) -> float:
    """The policy loss of two tokens with this advantage, whose ratio is 10."""
    old = torch.zeros(1, 2)
    log_prob = torch.full((1, 2), 10.0).log()
    return float(compute_policy_loss(old, log_prob, torch.full((1, 2), advantage), torch.ones(1, 2), **options)[0])


def without_a_range() -> bool:
    with refused(ConfigError, "cliprange"):
        clipped(1.0)
    return True


def gradient(kind: str) -> list[float]:
    log_prob = torch.tensor([0.5, -1.0], requires_grad=True)
    kl_penalty(log_prob, torch.zeros(2), kind).sum().backward()
    assert log_prob.grad is not None
    return log_prob.grad.tolist()


def no_such_mode() -> bool:
    with refused(UnknownName, "sample-mean"):
        agg_loss(ONES, MASK, "sample-mean")
    return True


def pads_with_the_end(model: str) -> bool:
    with pytest.warns(UserWarning, match="pad"):
        tokenizer = hf_tokenizer(model, pad_token=None)
    without = hf_tokenizer(model, correct_pad_token=False, pad_token=None)
    return (tokenizer.pad_token, without.pad_token) == (tokenizer.eos_token, None)


FACTS: Sequence[tuple[str, str, Callable[[Build, str], object]]] = [
    ("class", "methods of a user's subclass are called", lambda build, _: build(Mine).has_own_data),
    ("driver", "a trainer is an object of the script and starts no process", starts_nothing),
    ("ray", "ranks are actors of Ray", shown_by(GROUPS, "test_ranks_know_their_places_and_run_in_one_thread")),
    ("fsdp", "FSDP is a strategy", lambda *_: not unsupported("fsdp") and not unsupported("fsdp2")),
    ("megatron", "refused: Megatron", lambda *_: unsupported("megatron")),
    ("vllm", "vLLM is an engine", shown_by(TRANSLATION, "test_engines_of_gpus_become_vllm_over_as_many_gpus")),
    (
        "sglang",
        "refused: SGLang; vLLM samples instead",
        shown_by(TRANSLATION, "test_engines_of_gpus_become_vllm_over_as_many_gpus"),
    ),
    ("config", "the config has the training parameters", lambda build, _: build().run_config.schedule.steps == 1),
    (
        "tokenizer",
        "the tokenizer encodes and decodes",
        lambda build, _: (t := build().tokenizer).decode(t.encode("1+1=", add_special_tokens=False)) == "1+1=",
    ),
    (
        "mapping",
        "a role is mapped to a class of workers",
        lambda build, _: build(role_worker_mapping={Role.ActorRollout: MyActor})._roles == {Role.ActorRollout: MyActor},
    ),
    ("workers", "such a class is a Worker", lambda *_: issubclass(ActorRolloutRefWorker, Worker)),
    ("critic", "a role that the algorithm needs must be mapped", lambda build, _: needs_a_critic(build)),
    (
        "pools",
        "a manager has the pools of all roles",
        lambda *_: ResourcePoolManager({"a": [2], "b": [1]}, {Role.ActorRollout: "a"}).get_n_gpus() == 3,
    ),
    ("pools-default", "the config sizes the pools", lambda build, _: build().resource_pool_manager.get_n_gpus() == 3),
    (
        "group-class",
        "the class of groups may be the user's",
        lambda build, _: build(ray_worker_group_cls=MyGroup).ray_worker_group_cls is MyGroup,
    ),
    (
        "processor",
        "a processor is for rows with images",
        shown_by(
            "doors/verl/test_frontdoor_trainer.py",
            "test_images_are_read_with_the_processor_that_is_the_models",
        ),
    ),
    ("reward_fn", "reward_fn scores training", lambda build, _: rewards_of(build, False) == 1),
    ("val_reward_fn", "val_reward_fn scores validation", lambda build, _: rewards_of(build, True) == 2),
    ("train_dataset", "training reads a torch Dataset", lambda build, _: len(build().train_dataset) == 2),
    (
        "val_dataset",
        "validation reads one of its own",
        lambda build, _: build().val_dataloader is None and build(val_dataset=Rows()).val_dataloader is not None,
    ),
    (
        "collate_fn",
        "collate_fn builds batches of rows",
        shown_by(DOOR, "test_a_driver_as_of_main_ppo_trains_and_resumes"),
    ),
    (
        "train_sampler",
        "a torch Sampler orders the training",
        lambda build, _: order(build(train_sampler=Backwards(Rows()))) == [1, 0],
    ),
    ("cpu", "the device may be the CPU", lambda build, _: build(device_name="cpu").device_name == "cpu"),
    ("cuda", "the device may be the GPU", lambda build, _: needs_a_gpu_for_cuda(build)),
    (
        "loop",
        "fit trains: the driver calls the groups",
        shown_by(DOOR, "test_ppo_on_two_ranks_calls_the_users_classes_and_goes_on_with_one"),
    ),
    ("advantages", "advantages are computed in the driver", shown_by(DOOR, "test_there_is_no_second_loop")),
    (
        "init_workers-pools",
        "init_workers makes pools and groups: fit needs them",
        lambda build, _: asks_for_workers(build),
    ),
    (
        "init_workers-roles",
        "each role has its group",
        shown_by(GROUPS, "test_roles_share_a_process_and_its_process_group"),
    ),
    (
        "hf-type",
        "hf_tokenizer returns a tokenizer of transformers",
        lambda _, model: isinstance(hf_tokenizer(model), PreTrainedTokenizerBase),
    ),
    ("hf-end", "correct_pad_token sets a missing pad token", lambda _, model: pads_with_the_end(model)),
    (
        "hf-gemma2",
        "correct_gemma2 sets the end of Gemma 2's turns",
        shown_by("unit/text/test_text_tokenizer.py", "test_gemma2_ends_its_turns"),
    ),
    (
        "hf-kwargs",
        "further arguments reach transformers",
        lambda _, model: hf_tokenizer(model, padding_side="left").padding_side == "left",
    ),
    ("agg-scalar", "agg_loss gives one number", lambda *_: agg_loss(ONES, MASK, "token-mean").shape == ()),
    ("agg-mask", "masked tokens do not count", lambda *_: float(agg_loss(ONES + MASK, MASK, "token-mean")) == 2),
    (
        "agg-modes",
        "the mode is a way to average",
        lambda *_: [float(agg_loss(ONES, MASK, f"seq-mean-token-{how}")) for how in ("sum", "mean")] == [2, 1],
    ),
    ("agg-unknown", "another mode is an error", lambda *_: no_such_mode()),
    ("ppo-clip", "the ratio is clipped", lambda *_: clipped(1.0, cliprange=0.2) == pytest.approx(-1.2)),
    ("ppo-range", "a clip range must be given", lambda *_: without_a_range()),
    (
        "ppo-low",
        "cliprange_low is cliprange by default",
        lambda *_: clipped(-1.0, cliprange=0.2) == clipped(-1.0, cliprange_low=0.2, cliprange_high=0.2),
    ),
    (
        "ppo-high",
        "cliprange_high overrides cliprange above",
        lambda *_: clipped(1.0, cliprange=0.2, cliprange_high=0.5) == pytest.approx(-1.5),
    ),
    (
        "ppo-dual",
        "clip_ratio_c bounds the ratio where advantages are negative",
        lambda *_: [clipped(-1.0, cliprange=0.2, clip_ratio_c=c) for c in (3.0, 5.0)] == [3, 5],
    ),
    (
        "ppo-mode",
        "loss_agg_mode averages it",
        lambda *_: clipped(1.0, cliprange=0.2, loss_agg_mode="seq-mean-token-sum") == pytest.approx(-2.4),
    ),
    ("kl-value", "kl_penalty estimates a KL per token", lambda *_: kl_penalty(ONES, MASK, "kl").equal(ONES - MASK)),
    (
        "kl-straight",
        "a + gives an estimate the gradient of k2",
        lambda *_: gradient("k1+") == gradient("k2") == [0.5, -1],
    ),
    ("kl-own", "without one it has its own", lambda *_: gradient("k1") == [1, 1]),
    ("kl-home", "the functions are in core_algos", lambda *_: core_algos.kl_penalty is kl_penalty),
    ("reward-call", "compute_reward calls the manager", shown_by(MANAGERS, "test_managers_of_other_kinds")),
    ("reward-extra", "and returns what else it says", shown_by(MANAGERS, "test_managers_of_other_kinds")),
    ("manager-config", "the config names the class of the manager", shown_by(MANAGERS, "test_managers_by_name")),
    ("manager-default", "by default it is the naive one", shown_by(MANAGERS, "test_managers_by_name")),
    (
        "manager-type",
        "every manager is an AbstractRewardManager",
        lambda *_: issubclass(NaiveRewardManager, AbstractRewardManager),
    ),
    (
        "manager-examine",
        "num_examine samples are printed",
        shown_by(MANAGERS, "test_some_samples_of_each_source_are_logged_and_printed"),
    ),
    ("manager-kwargs", "reward_kwargs are arguments of it", shown_by(MANAGERS, "test_managers_by_name")),
    (
        "naive-score",
        "compute_score scores a response",
        shown_by(MANAGERS, "test_a_reward_is_on_the_last_token_of_its_response"),
    ),
    (
        "naive-key",
        "reward_fn_key is the column of the data source",
        shown_by(MANAGERS, "test_another_column_says_where_tasks_come_from"),
    ),
    (
        "dapo-limit",
        "max_resp_len and the buffer set where the penalty begins",
        shown_by(MANAGERS, "test_overlong_responses_lose_reward"),
    ),
    (
        "dapo-buffer",
        "the buffer's penalty grows with the length",
        shown_by(MANAGERS, "test_overlong_responses_lose_reward"),
    ),
]
"""(name, what verl documents, check with a builder of trainers and the path of a tiny model)."""


def order(trainer: RayPPOTrainer) -> list[int]:
    assert trainer.train_dataloader is not None
    return [*trainer.train_dataloader.sampler]


@pytest.mark.parametrize(("fact", "check"), [pytest.param(fact, check, id=name) for name, fact, check in FACTS])
def test_a_fact_is_honoured(fact: str, check: Callable[[Build, str], object], built: Build, model: str) -> None:
    assert check(built, model), fact
