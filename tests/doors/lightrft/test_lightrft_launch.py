"""LightRFT's launch arguments: how they are read, and what they are translated to."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.failing import refused
from trivium.config import RunConfig
from trivium.errors import ConfigError, DataError
from trivium.frontdoors.lightrft.config.config_table import TABLE
from trivium.frontdoors.lightrft.config.launch_args import flags_of, read
from trivium.frontdoors.lightrft.rule_rewards import RuleReward
from trivium.frontdoors.lightrft.translation import settings_of, translate
from trivium.frontdoors.translate import translate_file
from trivium.text.tiny import TinyModel

SCRIPT = """#!/usr/bin/env bash
# the owner's notes: don't "fix" it
set -x
MODEL="/models/$NAME"   # a folder
export N=4
NOW=$(date +"%m%d")
SYSTEM='Answer in \\\\boxed{}; it costs $5'
python prepare.py --out data || exit 1
torchrun --nnodes 2 --nproc-per-node=$N \\
  -m lightrft.train \\
  --pretrain ${MODEL} --prompt_data ${DATA:-rows.jsonl} \\
  --save_path "out/${NOW}" --system_prompt "$SYSTEM" --kl_target -1 --bf16 2>&1 | tee log-${NOW}.txt
"""


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A model and prompts."""
    folder = tmp_path_factory.mktemp("lightrft")
    TinyModel(TinyModel.Config(layers=1, hidden=8, heads=1, mlp=8), seed=0).materialize(folder / "model")
    rows = [{"prompt": f"{n}+1", "label": "gsm8k_rule", "reference": str(n + 1)} for n in range(10)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = {"rollout_batch_size": 4, "train_batch_size": 4, "n_samples_per_prompt": 2}
    paths = {"pretrain": str(folder / "model"), "prompt_data": str(folder / "rows.jsonl")}
    return {**paths, "input_key": "prompt", "apply_chat_template": True, **sizes}


def problems_of(config: object, name: str | None = None) -> dict[str, str]:
    """What is refused, and what to do about it."""
    with pytest.raises(ConfigError) as error:
        translate(config)
    return {problem.where: problem.do for problem in error.value.problems} or {str(name): error.value.do}


# --------------------------------------------------------------------------- reading


def test_words_are_flags_with_no_one_or_several_values() -> None:
    words = "torchrun --nnodes 2 --nproc-per-node=3 train_colocate.py --bf16 --l2=0.1 --adam_betas 0.9 0.95 --l2 -1e-3"
    flags = {"bf16": True, "l2": "-1e-3", "adam_betas": ["0.9", "0.95"], "torchrun": 6}
    assert flags_of(words.split()) == flags
    assert flags_of(["python", "-u", "-m", "torch.distributed.run", "t.py", "--bf16"]) == {"bf16": True}


def test_a_shell_script_is_read_with_its_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAME", "qwen")
    (tmp_path / "launch.sh").write_text(SCRIPT)
    flags = read([str(tmp_path / "launch.sh")])
    assert flags == {
        "pretrain": "/models/qwen",
        "prompt_data": "rows.jsonl",
        "save_path": "out/${command_output}",
        "system_prompt": "Answer in \\\\boxed{}; it costs $5",
        "kl_target": "-1",
        "bf16": True,
        "torchrun": 8,
    }


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        (
            'T=$(date +"%m%d")\npython t.py --pretrain m --save_path "out/$T" --bf16',
            {"save_path": "out/${command_output}"},
        ),
        ("python t.py --pretrain m --save_path out-`date +%s` --bf16", {"save_path": "out-${command_output}"}),
        ("python t.py --pretrain m --bf16 --seed $(( (1 + 2) * 3 ))", {"seed": "9"}),
        ("python t.py --pretrain m --save_path 'a$(b)' --bf16", {"save_path": "a$(b)"}),
    ],
)
def test_commands_of_a_script_are_not_run(text: str, flags: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(text)
    assert read([str(tmp_path / "run.sh")]) == {"pretrain": "m", "bf16": True, **flags}


def test_flags_that_a_command_prints_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text('python t.py --pretrain m --bf16 $([ "$A" = 1 ] && echo "--text_only")')
    with refused(ConfigError, "$(...)"):
        read([str(tmp_path / "run.sh")])


def test_files_of_words_and_of_flags_say_the_same_and_later_flags_count(tmp_path: Path) -> None:
    words, flags = ["train.py", "--pretrain", "m", "--bf16"], {"pretrain": "m", "bf16": True}
    for name, text in (
        ("words.json", json.dumps(words)),
        ("flags.json", json.dumps({"--pretrain": "m", "bf16": True})),
        ("flags.yaml", "pretrain: m\nbf16: true\n"),
        ("words.yaml", "- train.py\n- --pretrain\n- m\n- --bf16\n"),
    ):
        (tmp_path / name).write_text(text)
        assert read([str(tmp_path / name)]) == flags, name
    assert read([str(tmp_path / "words.json"), "seed=3", "--pretrain", "other"]) == {
        "pretrain": "other",
        "bf16": True,
        "seed": 3,
    }


@pytest.mark.parametrize(
    "words",
    [["--"], ["missing.json"], ["torchrun", "--nnodes", "1"], ["--pretrain", "m", "-x"], ["python", "t.py", "stray"]],
)
def test_what_cannot_be_read_is_said(words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        read(words)
    assert error.value.do


def test_a_script_with_several_launches_is_refused(tmp_path: Path) -> None:
    (tmp_path / "two.sh").write_text("python a.py --pretrain a\npython a.py --pretrain b\n")
    with refused(ConfigError, "two.sh", 2):
        read([str(tmp_path / "two.sh")])


# --------------------------------------------------------------------------- the table


def test_all_problems_are_found_at_once_with_what_was_meant(given: dict[str, Any]) -> None:
    words = ["--pretrain", "m", "--train_batchsize", "8", "--use_fire", "--top_p", "p", "--l2", "x", "--bf16", "yes"]
    wrong = problems_of([*words, "--max_len", "64", "--adam_betas", "0.9"])
    assert set(wrong) == {"train_batchsize", "use_fire", "top_p", "l2", "bf16", "max_len", "adam_betas"}
    assert "train_batch_size" in wrong["train_batchsize"]


def test_a_namespace_with_every_default_of_the_original_is_accepted(given: dict[str, Any]) -> None:
    defaults = {flag: TABLE.default_of(flag) for flag in TABLE.entries}
    defaults |= {"max_samples": 1e6, "first_token_temperature": 10.0, "max_ckpt_mem": 1e8, "lora_dropout": 0}
    assert settings_of(Namespace(**{**defaults, **given})).problems == ()
    assert translate(Namespace(**{**defaults, **given})).config["tasks"]["train"]["images"] == ""


def test_flags_of_openrlhf_that_share_a_name_are_taken(given: dict[str, Any]) -> None:
    translation = translate({**given, "rollout.temperature": "0.5", "algo.advantage.lambd": 1.0, "ds.zero_stage": 2})
    config = translation.config
    assert (config["engine"]["sampling"]["temperature"], config["algorithm"]["advantage"]["lam"]) == (0.5, 1.0)
    cut = translate({**given, "rollout.top_p": 0.9, "eval_data": given["prompt_data"]}).config
    assert cut["engine"]["sampling"]["top_p"] == cut["evaluation"]["sampling"]["top_p"] == 0.9
    assert any("OpenRLHF" in note for note in translation.notes)
    assert "rollout.temprature" in problems_of({**given, "rollout.temprature": 1.0})


def test_flags_without_effect_are_named(given: dict[str, Any]) -> None:
    notes = "\n".join(translate({**given, "engine_type": "vllm", "zero_stage": 3, "enable_ema": True}).notes)
    assert all(flag in notes for flag in ("engine_type: no effect", "zero_stage: no effect", "enable_ema"))


def test_a_variable_of_the_shell_is_left_out_of_a_path(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    translation = translate({**given, "ckpt_path": "runs/a-${current_time}"})
    assert translation.config["run"]["dir"] == "runs/a"
    assert any("current_time" in note for note in translation.notes)
    monkeypatch.setenv("current_time", "noon")
    assert translate({**given, "ckpt_path": "runs/a-${current_time}"}).config["run"]["dir"] == "runs/a-noon"
    assert "pretrain" in problems_of({**given, "pretrain": "${MODEL}"})


# --------------------------------------------------------------------------- what it becomes


def made(given: dict[str, Any], **flags: Any) -> RunConfig:
    return RunConfig.model_validate(translate({**given, **flags}).config)


def test_sizes_become_groups_mini_batches_and_steps(given: dict[str, Any]) -> None:
    run = made(given, num_episodes=3, critic_learning_rate=1e-3, lr_warmup_ratio=0.2, micro_train_batch_size=2)
    assert (run.schedule.groups_per_step, run.schedule.group_size, run.schedule.steps) == (4, 2, 6)
    algorithm: Any = run.algorithm
    train: Any = run.train
    assert (algorithm.kind, algorithm.mini_batches, algorithm.advantage.lam) == ("ppo", 2, 0.95)
    assert (train.critic_optimizer.lr, train.optimizer.warmup_steps, train.optimizer.schedule) == (1e-3, 2, "cosine")
    assert train.max_tokens_per_micro_batch == 2 * 2048
    assert (algorithm.normalise_advantages, algorithm.policy_loss.dual_clip) == ("std", None)


GROUP = {"advantage_estimator": "group_norm"}


@pytest.mark.parametrize(
    ("flags", "read_it"),
    [
        (
            {"advantage_estimator": "rloo"},
            lambda a: (a.advantage.baseline, a.normalise_advantages) == ("others", "none"),
        ),
        (
            {**GROUP, "use_kl_loss": True, "kl_estimator": "k3"},
            lambda a: (a.kl.place, a.kl.estimator.kind) == ("loss", "k3"),
        ),
        ({**GROUP, "use_kl_loss": True}, lambda a: a.kl.estimator.kind == "k1+"),
        (
            {"kl_target": 0.2, "kl_horizon": 50},
            lambda a: (a.kl.controller, a.kl.target, a.kl.horizon) == ("adaptive", 0.2, 50),
        ),
        ({"init_kl_coef": 0}, lambda a: a.kl.coef == 0),
        (
            {**GROUP, "use_cpg_loss": True, "eps_clip": 0.1},
            lambda a: (a.policy_loss.kind, a.policy_loss.clip_low) == ("cpgd", 0.1),
        ),
        ({**GROUP, "use_gspo": True}, lambda a: a.policy_loss.kind == "gspo"),
        ({**GROUP, "loss_agg_mode": "token-mean"}, lambda a: a.aggregate == "token-mean"),
        (
            {**GROUP, "high_entropy_token_ratio": 0.2},
            lambda a: (a.gates[0].fraction, a.gates[0].per) == (0.2, "sequence"),
        ),
        ({**GROUP, "dynamic_sampling": True}, lambda a: (a.filters[0].kind, a.refill) == ("zero_variance", 5)),
        (
            {"advantage_clip": 4.0, "freezing_actor_steps": 3},
            lambda a: (a.clip_advantages, a.critic_warmup) == (4.0, 3),
        ),
        ({"value_clip": 0.4}, lambda a: a.critic.clip == 0.4),
        (
            {"reward_clip": 2, "reward_running_norm": True},
            lambda a: [s.kind for s in a.shaping] == ["running_normalise", "clip"],
        ),
        (
            {"overlong_buffer": True, "overlong_buffer_len": 256},
            lambda a: (a.shaping[0].kind, a.shaping[0].buffer) == ("overlong_penalty", 0.25),
        ),
    ],
)
def test_flags_of_the_algorithm(given: dict[str, Any], flags: dict[str, Any], read_it: Callable[[Any], bool]) -> None:
    assert read_it(made(given, **flags).algorithm), made(given, **flags).algorithm


@pytest.mark.parametrize(
    ("flags", "where"),
    [
        ({"train_batch_size": 16}, "train_batch_size"),
        ({"train_batch_size": 3}, "train_batch_size"),
        ({"rollout_batch_size": 0}, "rollout_batch_size"),
        ({"advantage_estimator": "grpoo"}, "advantage_estimator"),
        ({**GROUP, "n_samples_per_prompt": 1}, "n_samples_per_prompt"),
        ({"dynamic_sampling": True}, "dynamic_sampling"),
        ({**GROUP, "freezing_actor_steps": 2}, "freezing_actor_steps"),
        ({**GROUP, "use_kl_loss": True, "kl_target": 0.1}, "kl_target"),
        ({"critic_pretrain": "other"}, "critic_pretrain"),
        ({"pretrain_data": "texts.jsonl"}, "pretrain_data"),
        ({"reward_pretrain": '{"a": "m", "b": "n"}'}, "reward_pretrain"),
        ({"freeze_prefix": ["layers.0"]}, "freeze_prefix"),
        ({"input_template": "no place", "apply_chat_template": False}, "input_template"),
        ({"prompt_data": None}, "prompt_data"),
        ({"prompt_data": "a.csv"}, "prompt_data"),
        ({"prompt_data": "a.jsonl,b.jsonl", "prompt_data_probs": "1"}, "prompt_data_probs"),
    ],
)
def test_what_cannot_be_had_is_refused_by_its_flag(given: dict[str, Any], flags: dict[str, Any], where: str) -> None:
    assert where in problems_of({**given, **flags})


def test_fewer_prompts_than_a_batch_are_refused(given: dict[str, Any]) -> None:
    with refused(ConfigError, "prompt_data", 10, "rollout_batch_size"):
        translate({**given, "rollout_batch_size": 16})


def test_data_rewards_and_monitors(given: dict[str, Any]) -> None:
    flags = {"use_wandb": "secret", "wandb_project": "p", "use_tensorboard": "logs", "remote_rm_url": None}
    translation = translate({**given, **flags, "max_samples": 8, "system_prompt": "Think.", "label_key": "kind"})
    tasks, monitors = translation.config["tasks"]["train"], translation.config["monitors"]
    assert (tasks["kind"], tasks["limit"], tasks["system"]) == ("jsonl", 8, "Think.")
    assert [monitor["kind"] for monitor in monitors] == ["console", "jsonl", "wandb", "tensorboard"]
    assert "secret" not in translation.to_yaml() + "".join(translation.notes)
    assert translation.config["rewards"][0]["column"] == "kind"
    model = translate({**given, "reward_pretrain": given["pretrain"]}).config["rewards"]
    assert model == [{"kind": "model", "path": given["pretrain"]}]
    (remote,) = made(given, remote_rm_url="http://localhost:5000/get_reward").rewards
    assert (remote.kind, getattr(remote, "protocol", None)) == ("remote", "lightrft")


def test_a_system_prompt_is_read_from_a_file(given: dict[str, Any], tmp_path: Path) -> None:
    for name, text in (("a.txt", "Think.\n"), ("b.yaml", "math: Think."), ("c.yml", '"Think."')):
        (tmp_path / name).write_text(text)
        tasks = translate({**given, "system_prompt_path": str(tmp_path / name)}).config["tasks"]
        assert tasks["train"]["system"] == "Think."
    (tmp_path / "two.yaml").write_text("math: Think.\ntext: Write.")
    for path, found in ((tmp_path / "two.yaml", "2 prompts: math, text"), (tmp_path / "none.txt", "none.txt")):
        with refused(ConfigError, found):
            translate({**given, "system_prompt_path": str(path)})


def test_a_rule_reads_the_completion_and_the_reference_of_a_row() -> None:
    config = RuleReward.Config(kind="rule", rule="gsm8k_rule")
    reward, right = RuleReward(config), "<think>1+1</think> \\boxed{2}"
    assert reward("<think></think>", right, reward_model={"ground_truth": "2"}) == pytest.approx(1.0)
    assert reward("<think></think> \\boxed{2}", "\\boxed{3}", extra_info={"constraints": "2"}) == 0
    with pytest.raises(DataError):
        reward("1+1?", right)


def test_without_a_chat_template_the_prompt_is_the_text_in_its_place(given: dict[str, Any]) -> None:
    flags = {"apply_chat_template": False, "input_template": "Q {x}: {} A:"}
    config = translate({**given, **flags}).config
    assert config["model"]["chat_template"] == "plain"
    assert config["tasks"]["train"]["template"] == "Q {{x}}: {prompt} A:"


def test_sets_are_mixed_by_their_probabilities_until_one_is_exhausted(given: dict[str, Any]) -> None:
    both = f"{given['prompt_data']}, {given['prompt_data']}"
    assert made(given, prompt_data=both).schedule.steps == 5
    mixed = translate({**given, "prompt_data": both, "prompt_data_probs": "3,1"}).config
    assert mixed["tasks"]["train"]["args"]["probabilities"] == [0.75, 0.25]
    assert 10 <= mixed["schedule"]["steps"] * 4 < 20


def test_the_file_and_the_flags_are_translated_alike(given: dict[str, Any], tmp_path: Path) -> None:
    words = [
        word
        for flag, value in given.items()
        for word in ([f"--{flag}"] if value is True else [f"--{flag}", str(value)])
    ]
    (tmp_path / "flags.json").write_text(json.dumps(["torchrun", "train.py", *words]))
    from_file = translate_file("lightrft", str(tmp_path / "flags.json"))
    assert from_file == translate_file("lightrft", words[0], words[1:]) == translate(given)


def test_the_device_is_left_to_the_machine_that_runs_the_config(given: dict[str, Any]) -> None:
    config = translate(given).config
    assert not {"device"} & (config["engine"].keys() | config["train"].keys())
