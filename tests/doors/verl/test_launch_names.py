"""The names of verl's launch scripts: config, dataset, sampler, what a config needs, roles and pools."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.failing import refused
from trivium.foundation.errors import ConfigError, DataError
from trivium.foundation.registry import lazy_names
from trivium.frontdoors import verl
from trivium.frontdoors.verl import (
    RLHFDataset,
    collate_fn,
    config_of,
    copy_to_local,
    create_rl_dataset,
    create_rl_sampler,
    get_dataset_class,
    load_extern_object,
    need_critic,
    need_reference_policy,
    need_reward_model,
    validate_config,
    with_defaults,
)
from trivium.frontdoors.verl.translation import settings_of
from trivium.text.tiny import tiny_tokenizer

MODEL = {
    "actor_rollout_ref": {"model": {"path": "/m"}, "rollout": {"name": "torch"}},
    "critic": {"model": {"path": "/m"}},
}


@pytest.fixture
def tokenizer() -> Any:
    return tiny_tokenizer("0123456789+")


@pytest.fixture
def files(tmp_path: Path) -> str:
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": "1+" * (4 if number == 2 else 1) + "1"}],
            "reward_model": {"ground_truth": "2"},
            "extra_info": {"index": 10 + number},
        }
        for number in range(4)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_every_name_is_there() -> None:
    assert [name for name in lazy_names(str(verl.__file__)) if getattr(verl, name, None) is None] == []
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        verl.nothing_of_that_name  # noqa: B018


def test_the_guide_lists_names_of_verl_that_are_absent() -> None:
    guide = (Path(verl.__file__).parents[3] / "docs" / "ray-ppo-trainer.md").read_text()
    table = guide.partition("These names of verl are absent")[2].partition("\n## ")[0]
    listed = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.partition(" | ")[0])}
    absent = {"apply_kl_penalty", "compute_advantage", "compute_response_mask", "compute_rewards", "kl_penalty_forward"}
    absent |= {"compute_policy_loss_reinforce", "compute_policy_loss_bypass_mode", "compute_gdpo_outcome_advantage"}
    assert absent | {"RayResourcePool", "hydra", "OmegaConf"} <= listed
    listed -= {"register"}  # the door has that of reward managers
    assert [name for name in listed if hasattr(verl, name) or hasattr(verl.core_algos, name)] == []


def test_a_config_has_verls_defaults_and_the_arguments() -> None:
    config = with_defaults(config_of(["data.train_batch_size=4", "+algorithm.my_key=[1,2]"]))
    assert (config.data.train_batch_size, config.data.max_prompt_length, config.algorithm.my_key) == (4, 512, [1, 2])
    assert config.actor_rollout_ref.actor.strategy == "fsdp"
    assert config.trainer.get("nothing", 7) == 7
    with pytest.raises(AttributeError, match="max_promt_length"):
        config.data.max_promt_length  # noqa: B018
    assert config.transfer_queue.enable is False


def test_text_without_a_reference_stays_what_it_is() -> None:
    config = config_of([r"trainer.project_name=a\${x}", r"trainer.default_local_dir=${trainer.project_name}/b"])
    for each in (config, with_defaults(config), with_defaults(with_defaults(config))):
        values = settings_of(each)
        assert values["trainer.project_name"] == "a${x}"
        assert str(values["trainer.default_local_dir"]) == "a${x}/b"
    assert with_defaults(config).trainer.project_name == "a${x}"
    renamed = with_defaults(config_of([r"trainer.val_generations_to_log_to_wandb=3", r"algorithm.my_key=\${x}"]))
    assert (renamed.trainer.log_val_generations, renamed.algorithm.my_key) == (3, "${x}")


def test_a_config_file_is_under_the_arguments(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("a: {b: 1, c: '${a.b}', d: 3}\ntrainer: {nnodes: 2}\n")
    given = [f"--config-path={tmp_path}", "--config-name", "mine", "a.b=2", "~a.d"]
    assert config_of(given) == {"a": {"b": 2, "c": 2}, "trainer": {"nnodes": 2}}
    with refused(ConfigError, "'other'", "--config-path"):
        config_of(["--config-name=other"])
    with refused(ConfigError, "--multirun"):
        config_of(["--multirun"])


def test_what_a_config_needs() -> None:
    assert need_critic({})
    assert not need_critic({"algorithm": {"adv_estimator": "grpo"}})
    assert not need_critic({"critic": {"enable": False}})
    assert not need_reference_policy({})
    assert need_reference_policy({"algorithm": {"use_kl_in_reward": True}})
    assert need_reference_policy({verl.Role.RefPolicy: object})
    assert not need_reference_policy({verl.Role.ActorRollout: object})
    assert need_reward_model({verl.Role.RewardModel: object})
    assert not need_reward_model({})
    validate_config(MODEL, use_reference_policy=False, use_critic=True)
    with refused(ConfigError, "algorithm.adv_estimator", "'grpo'"):
        validate_config({**MODEL, "algorithm": {"adv_estimator": "grpo"}}, use_critic=True)
    with refused(ConfigError, "data.train_batchsize", "data.train_batch_size"):
        validate_config({**MODEL, "data": {"train_batchsize": 3}})


def test_a_dataset_of_files(files: str, tokenizer: Any) -> None:
    config = {"max_prompt_length": 6, "filter_overlong_prompts": True, "seed": 3}
    dataset = create_rl_dataset(files, config, tokenizer, None)
    assert [row["index"] for row in dataset] == [10, 11, 13]
    assert dataset[0]["raw_prompt"] == [{"role": "user", "content": "1+1"}]
    columns = collate_fn([{**dataset[row], "t": torch.ones(2)} for row in range(2)])
    assert columns["t"].shape == (2, 2)
    assert columns["data_source"].tolist() == ["sums", "sums"]
    assert list(create_rl_sampler({"shuffle": False}, dataset)) == [0, 1, 2]
    first, again = (list(create_rl_sampler(config, dataset)) for _ in range(2))
    assert first == again
    assert sorted(first) == [0, 1, 2]


def test_messages_of_a_subclass_are_the_prompts(files: str, tokenizer: Any) -> None:
    class Asking(RLHFDataset):
        def _build_messages(self, example: dict[str, Any]) -> list[dict[str, Any]]:
            return [{"role": "user", "content": "2+" + example["prompt"][0]["content"]}]

    row = Asking(files, tokenizer, {}, max_samples=1)[0]
    assert row["prompt"] == row["raw_prompt"] == [{"role": "user", "content": row["prompt"][0]["content"]}]
    assert row["prompt"][0]["content"].startswith("2+1+")


def test_classes_and_files_by_path(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Mine: ...\n")
    cls = get_dataset_class({"custom_cls": {"path": str(tmp_path / "mine.py"), "name": "Mine"}})
    assert cls is load_extern_object(str(tmp_path / "mine.py"), "Mine")
    assert get_dataset_class({}) is RLHFDataset
    assert copy_to_local("~/x") == str(Path.home() / "x")
    assert copy_to_local("Qwen/Qwen3") == "Qwen/Qwen3"
    with refused(DataError, "hdfs://host/x"):
        copy_to_local("hdfs://host/x")
