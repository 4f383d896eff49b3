"""Scripts for TRL and launch scripts of verl, as their documentation writes them, translated without being run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from failing import refused

from trivium.config import config_from_mapping, merged
from trivium.foundation.errors import ConfigError
from trivium.frontdoors.shell import commands
from trivium.frontdoors.translate import translate_file
from trivium.text.tiny import TinyModel

DATA = Path(__file__).parents[1] / "data"
LORA = "train.lora"
ROWS = {"buffer": {"kind": "files"}}
QWEN = {"model.path": "Qwen/Qwen2-0.5B-Instruct"}

TRL: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "grpo_quickstart": (
        {
            **QWEN,
            "algorithm.kind": "grpo",
            "run.dir": "Qwen2-0.5B-GRPO",
            "tasks.train": {"kind": "datasets", "path": "trl-lib/tldr", "split": "train"},
            "schedule": {"group_size": 8, "groups_per_step": 1},
            LORA: None,
            "train.device": None,
            "engine": {"sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 512}},
        },
        ("reward_funcs", "schedule.steps"),
    ),
    "grpo_vllm_lora": (
        {
            "model.path": "Qwen/Qwen2.5-3B-Instruct",
            "schedule": {"steps": 200, "group_size": 4, "groups_per_step": 8},
            "train.optimizer.warmup_steps": 20,
            "train.optimizer.schedule": "cosine",
            "train.dtype": None,
            LORA: {"rank": 64, "alpha": 128},
            "engine.kind": "vllm",
            "engine.gpu_memory_utilization": 0.4,
            "engine.tensor_parallel_size": 2,
            "engine.device": None,
            "monitors": ["console", "jsonl", {"kind": "wandb", "name": "numina"}],
        },
        ("GRPOConfig(bf16)", "GRPOTrainer(train_dataset)", "think_format_reward", "eval_dataset", "trackio"),
    ),
    "sft_quickstart": (
        {
            "model.path": "Qwen/Qwen3-0.6B",
            "algorithm.kind": "sft",
            "train.optimizer.lr": 2e-5,
            "schedule": {"group_size": 1, "groups_per_step": 8},
            **ROWS,
        },
        ("schedule.steps", "the loss"),
    ),
    "sft_lora": (
        {
            "model.path": "facebook/opt-350m",
            "run.dir": "/tmp/opt-sft",
            "train.optimizer.lr": 2e-5,  # TRL's default, since the script computes its own
            "tasks.train": {
                "kind": "datasets",
                "path": "stanfordnlp/imdb",
                "subset": "plain_text",
                "split": "train",
                "max_tokens": 512,
                "on_overlong": "cut_right",
            },
            LORA: {"rank": 16, "alpha": 32, "targets": ["q_proj", "v_proj"]},
            "schedule.groups_per_step": 8,
            "checkpoint.save_every": 0,
        },
        (
            "SFTConfig(learning_rate): args.learning_rate",
            "processing_class",
            "dataset_test_split",
            "packing",
            "save_every",
        ),
    ),
    "dpo_quickstart": (
        {
            **QWEN,
            "algorithm.kind": "dpo",
            "algorithm.pair_loss": {"beta": 0.1},
            "train.optimizer.lr": 1e-6,
            "schedule": {"steps": 100, "group_size": 2, "groups_per_step": 8},
            **ROWS,
        },
        ("processing_class",),
    ),
    "dpo_ipo": (
        {
            **QWEN,
            "algorithm.kind": "ipo",
            "algorithm.pair_loss": {"beta": 0.05},
            "train.optimizer.warmup_steps": 30,
            LORA: {"rank": 8, "alpha": 8},
            "monitors": None,
            "evaluation": {"held_out": "test", "every": 50},
            "tasks.test": {"kind": "datasets", "path": "trl-lib/ultrafeedback_binarized", "split": "test"},
        },
        ("ref_model", "changes the rows", "sum over tokens", "train.lora.targets", "dtype"),
    ),
    "kto_quickstart": (
        {
            **QWEN,
            "algorithm.kind": "kto",
            "algorithm.pair_loss": {"beta": 0.2, "desirable_weight": 1.33, "undesirable_weight": 1.0},
            "schedule": {"steps": 20, "group_size": 1, "groups_per_step": 8},
            "tasks.train.path": "trl-lib/kto-mix-14k",
            **ROWS,
        },
        ("processing_class",),
    ),
    "reward_quickstart": (
        {
            "algorithm.kind": "reward_model",
            "train.optimizer.lr": 1e-4,
            "schedule": {"group_size": 2, "groups_per_step": 2},
            **ROWS,
        },
        ("schedule.steps", "num_labels"),
    ),
}

DEVICE = {"engine.device": "auto", "engine.dtype": "auto", "train.device": "auto", "train.dtype": "auto"}
VERL: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "gsm8k_ppo": (
        {
            **DEVICE,
            "algorithm.kind": "ppo",
            "engine.kind": "vllm",
            "engine.gpu_memory_utilization": 0.4,
            "engine.tensor_parallel_size": 1,
            "schedule.groups_per_step": 256,
            "train.critic_optimizer.lr": 1e-5,
            "tasks.train.path": "/home/me/data/gsm8k/train.parquet",
            "checkpoint.save_every": 10,
            "evaluation.every": 10,
        },
        ("schedule.steps", "val_before_train"),
    ),
    "math_grpo": (
        {
            **DEVICE,
            "tasks.train.path": ["/home/me/data/gsm8k/train.parquet", "/home/me/data/math/train.parquet"],
            "algorithm.kl.coef": 0.001,
            "engine.tensor_parallel_size": 2,
            "run.dir": "checkpoints/verl_grpo_example/qwen2_7b",
        },
        ("n_gpus_per_node",),
    ),
    "grpo_lora": (
        {
            "model.path": "Qwen/Qwen2.5-3B-Instruct",
            LORA: {"rank": 64, "alpha": 32},
            "schedule.groups_per_step": 29,
            "engine.kind": "vllm",
        },
        ("layered_summon",),
    ),
    "dapo": (
        {
            "model.path": "/data/verl/models/Qwen2.5-7B",
            "run.dir": "/data/verl/ckpts/DAPO/DAPO-7B",
            "engine.max_context": 10240,
            "train.max_tokens_per_micro_batch": 10240,
            "algorithm.policy_loss.clip_high": 0.28,
            "algorithm.shaping": [{"kind": "overlong_penalty", "factor": 1.0, "buffer": 0.5, "limit": 8192}],
            "schedule": {"shuffle": True, "steps": 400, "groups_per_step": 512, "group_size": 16},
        },
        ("trainer.device",),
    ),
    "arrays": (
        {
            "algorithm.advantage.kind": "rloo",
            "tasks.train.path": ["/data/a.parquet", "/data/b.parquet"],
            "algorithm.entropy.coef": 0.001,
            "model.path": "Qwen/Qwen3-8B",
            "schedule": {"shuffle": True, "steps": 50, "groups_per_step": 128, "group_size": 4},
        },
        (),
    ),
    "sglang": (
        {
            "engine.kind": "vllm",
            "engine.tensor_parallel_size": 4,
            "schedule.groups_per_step": 64,
            "run.dir": "checkpoints/verl_examples/run",
            "checkpoint.save_every": 20,
        },
        ("conditions and loops", "trainer.experiment_name", "vLLM samples instead of sglang"),
    ),
    "cpu": (
        {"engine.kind": "torch", "engine.device": "cpu", "train.dtype": "float32", "engine.tensor_parallel_size": None},
        ("tensor_model_parallel_size", "gpu_memory_utilization"),
    ),
    "gspo": (
        {
            "algorithm.policy_loss.kind": "gspo",
            "algorithm.policy_loss.clip_low": 0.0003,
            "algorithm.aggregate": "seq-mean-token-mean",
            "engine.sampling.top_k": 0,
        },
        ("swanlab",),
    ),
    "remax": (
        {"algorithm.advantage.kind": "remax", "train.cpu_offload": True, "schedule.steps": 20},
        (),
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(TinyModel(TinyModel.Config(), seed=0).materialize(tmp_path_factory.mktemp("scripts") / "model"))


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for name in ("MODEL_PATH", "RAY_DATA_HOME", "CKPTS_DIR", "NNODES"):
        monkeypatch.delenv(name, raising=False)


def at(config: dict[str, Any], path: str) -> Any:
    value: Any = config
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


PARTS = (("train", "train"), ("val", "holdout"), ("test", "holdout"))
"""(taskset, its part of the sums)."""


def check(origin: str, file: str, case: tuple[dict[str, Any], tuple[str, ...]], model: str) -> None:
    """Compares a translation, and reads its config with a model, tasks and rewards of this machine."""
    expected, named = case
    translation = translate_file(origin, str(DATA / origin / file))
    assert {path: at(translation.config, path) for path in expected} == expected
    missing = [name for name in named if not any(name in note for note in translation.notes)]
    assert not missing, translation.notes
    tasks = {name: {"kind": "arithmetic", "part": part} for name, part in PARTS}
    tasks = {name: {**task, "holdout_fraction": 0.1} for name, task in tasks.items()}
    here = {"model": {"path": model}, "tasks": tasks, "rewards": ["exact"]}
    config_from_mapping(merged({**translation.config, "tasks": {}, "rewards": []}, here))


@pytest.mark.parametrize("name", TRL)
def test_a_script_for_trl_is_read_and_not_run(name: str, model: str) -> None:
    check("trl", f"{name}.py", TRL[name], model)


@pytest.mark.parametrize("name", VERL)
def test_a_launch_script_of_verl_is_read(name: str, model: str) -> None:
    check("verl", f"{name}.sh", VERL[name], model)


@pytest.mark.parametrize(
    ("evaluated", "split"),
    [
        ('load_dataset("a/b", "c", split="validation")', "validation"),
        ('load_dataset("a/b", split="validation")', "test"),  # of another subset
        ('load_dataset("a/b", "c", split="train[:5%]")', "test"),
        ('rows.train_test_split(0.1)["validation"]', "test"),
        ("held_out()", "test"),
    ],
)
def test_rows_of_another_split_are_evaluated(evaluated: str, split: str, tmp_path: Path) -> None:
    script = f"""
from trl import SFTTrainer, SFTConfig
rows = load_dataset("a/b", "c", split="train").shuffle()
args = SFTConfig(output_dir="out", eval_strategy="epoch", max_steps=3)
SFTTrainer(args=args, model="m", eval_dataset={evaluated}, train_dataset=rows)
"""
    (tmp_path / "train.py").write_text(script)
    translation = translate_file("trl", str(tmp_path / "train.py"))
    rows = {"kind": "datasets", "path": "a/b", "subset": "c"}
    assert translation.config["tasks"] == {"train": {**rows, "split": "train"}, "test": {**rows, "split": split}}
    assert any("eval_dataset" in note for note in translation.notes) is (split == "test")


def test_arguments_that_a_script_for_trl_computes_are_named() -> None:
    translation = translate_file("trl", str(DATA / "trl" / "grpo_computed.py"), ["model_name_or_path=m", "top_k=3"])
    config, notes = translation.config, " ".join(translation.notes)
    assert config["schedule"]["steps"] == 50
    assert config["engine"]["sampling"]["top_k"] == 3
    assert "kl" not in config["algorithm"], "the variable of a loop is no constant"
    assert config["train"]["optimizer"]["lr"] == 1e-6, "TRL's default"
    for name in ("learning_rate", "beta", "COMMON", "GRPOTrainer(model)", "Dataset.from_list", "tasks.train"):
        assert name in notes


@pytest.mark.parametrize(
    ("origin", "file", "overrides", "named"),
    [
        ("trl", "trl/grpo_parser.py", [], ("grpo_parser.py", "command line", "trainer=grpo")),
        ("trl", "trl/grpo_computed.py", [], ("model_name_or_path",)),
        ("trl", "verl/cpu.sh", [], ("cpu.sh", ".sh", "Python script")),
        ("trl", "trl/none.py", [], ("none.py",)),
        ("verl", "trl/grpo_quickstart.py", [], ("Python program", "trivium.frontdoors.verl", "main_ppo")),
        ("verl", "verl/sft.sh", [], ("fsdp_sft_trainer", "main_ppo", "trivium.frontdoors.verl")),
        ("verl", "verl/none.sh", [], ("none.sh",)),
        ("trinity", "verl/cpu.sh", [], ("cpu.sh", ".sh", "translate")),
        ("trl", "trl/dpo_quickstart.py", ["loss_type=hinge"], ("loss_type", "hinge", "sigmoid")),
        ("trl", "trl/reward_quickstart.py", ["use_peft=true"], ("use_peft",)),
        ("trl", "trl/sft_quickstart.py", ["completion_only_loss=false"], ("completion_only_loss",)),
    ],
)
def test_what_is_no_script_of_the_kind_is_refused(
    origin: str, file: str, overrides: list[str], named: tuple[str, ...]
) -> None:
    with refused(ConfigError, *named):
        translate_file(origin, str(DATA / file), overrides)


def test_the_arguments_of_a_script_for_trl_may_follow_it() -> None:
    overrides = ["model_name_or_path=m", "dataset_name=d", "use_peft=true", "lora_target_modules=all-linear"]
    config = translate_file("trl", str(DATA / "trl" / "grpo_parser.py"), overrides).config
    assert (config["model"]["path"], config["tasks"]["train"]["path"]) == ("m", "d")
    assert config["train"]["lora"] == {"rank": 16, "alpha": 32}


def test_two_trainers_in_a_script_are_chosen_from(tmp_path: Path) -> None:
    script = tmp_path / "two.py"
    script.write_text("SFTTrainer('a', args=SFTConfig(max_steps=1))\nDPOTrainer('b', args=DPOConfig(max_steps=2))\n")
    with refused(ConfigError, "dpo", "sft"):
        translate_file("trl", str(script))
    assert translate_file("trl", str(script), ["trainer=dpo"]).config["schedule"]["steps"] == 2


def test_the_words_of_a_shell_script(tmp_path: Path) -> None:
    text = """
A='it'"'"'s $A' B="two words"; C=$B   # "unclosed
N=$(( (2 + 3) * 4 / 6 )) D=${UNSET_X:-"${B} more"} T=$(date) U=`date`
L=(x "y z"); L+=($N)
run $B "$B" '$B' "\\$B" "${L[@]}" "$D" $UNSET_X "$T" $U "${@:2}" $@ > log 2>&1
"""
    words = next(words for words in commands(text, tmp_path) if words[:1] == ["run"])
    expected = ["two", "words", "two words", "$B", "$B", "x", "y z", "3", "two words more", "$UNSET_X"]
    assert words == ["run", *expected, "${command_output}", "${command_output}"]
