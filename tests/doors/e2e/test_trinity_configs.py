"""Configs of Trinity-RFT's shape and its own examples, on a tiny model: each trains two steps."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.peers import peer_file
from tests.processes import Forked, commands
from trivium import run
from trivium.config import config_from_mapping, merged, read_yaml
from trivium.frontdoors.overrides import overridden
from trivium.frontdoors.trinity import Trainer, load_config
from trivium.frontdoors.trinity.config.registries import PLUGIN_DIRS, load_plugins
from trivium.frontdoors.trinity.translation import translate
from trivium.text.tiny import TinyModel

HERE = Path(__file__).parent
VARIANTS = ("grpo", "off_policy", "ppo", "mix", "sft", "dpo")
SMALL = (
    "model.max_model_len=256",
    "model.max_prompt_tokens=null",
    "model.max_response_tokens=4",
    "algorithm.repeat_times=2",
    "buffer.total_steps=2",
    "buffer.batch_size=2",
    "buffer.explorer_input.eval_tasksets=null",
    "monitor.monitor_type=tensorboard",
    "trainer.save_interval=0",
)
"""What makes an example small."""
ROWS = "buffer.explorer_input.taskset.path"
BOXED = "buffer.explorer_input.default_workflow_type=math_boxed_workflow"
"""Boxes are compared in this process, and answers of `math_workflow` in one that takes seconds to start."""
EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "grpo_gsm8k__gsm8k": (),
    "grpo_lora_gsm8k__gsm8k": (BOXED,),
    "opmd_gsm8k__opmd_gsm8k": (BOXED,),
    "asymre_gsm8k__gsm8k": (BOXED,),
    "ppo_countdown__countdown": (f"{ROWS}=numbers.jsonl",),
    "mix_math__mix_math": ("buffer.train_batch_size=5",),
    "dpo_humanlike__dpo": (
        "buffer.train_batch_size=4",
        "buffer.trainer_input.experience_buffer.path=rows.jsonl",
    ),
    "dpo_human_in_the_loop__dpo": (
        "mode=train",
        "buffer.train_batch_size=4",
        "buffer.trainer_input.experience_buffer.path=rows.jsonl",
    ),
    "opd_gsm8k__opd_gsm8k_jsd": (),
    "grpo_frozen_lake__frozen_lake": (f"{ROWS}=lakes.jsonl", "model.max_model_len=1024"),
    "bots__ref_eval_collect": (f"{ROWS}=rows.jsonl",),
}
PAIR = {"async_gsm8k__explorer": (), "async_gsm8k__trainer": ("buffer.train_batch_size=4",)}
PLUGIN = """
from trivium.frontdoors.trinity import WORKFLOWS, SimpleWorkflow

@WORKFLOWS.register_module("bots_ref_eval_collect_math_boxed_workflow")
class Collect(SimpleWorkflow):
    def run(self):
        responses = self.model.chat(self.format_messages(), **self.rollout_args)
        for response in responses:
            response.reward = float(len(response.response_text) % 2)
        return responses
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a model, rows and a plugin, where the examples' environment leads."""
    config = TinyModel.Config(layers=1, hidden=16, heads=2, mlp=16, max_position=1024)
    TinyModel(config, seed=0).materialize(tmp_path / "model")
    write(tmp_path / "rows.jsonl", [row(a, b) for a in range(4) for b in range(4)])
    write(tmp_path / "numbers.jsonl", [{**row(1, 2), "answer": json.dumps({"target": 3, "numbers": [1, 2]})}])
    write(tmp_path / "lakes.jsonl", [{"seed": seed, "size": 3, "p": 0.8} for seed in range(4)])
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / f"collect_{random.Random(str(tmp_path)).getrandbits(40)}.py").write_text(PLUGIN)
    rows = str(tmp_path / "rows.jsonl")
    for name, value in {
        "TRINITY_MODEL_PATH": str(tmp_path / "model"),
        "TRINITY_TASKSET_PATH": rows,
        "TRINITY_SFT_DATASET_PATH": rows,
        "TRINITY_CHECKPOINT_ROOT_DIR": str(tmp_path / "runs"),
        PLUGIN_DIRS: str(tmp_path / "plugins"),
        "HF_HUB_OFFLINE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    load_plugins.cache_clear()
    return tmp_path


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))


def row(a: int, b: int) -> dict[str, Any]:
    """A row with the columns of every example."""
    question, answer = f"{a}+{b}=", f"so\n#### {a + b}"
    talk = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    texts = {"question": question, "problem": question, "prompt": question, "answer": answer}
    return {**texts, "messages": talk, "chosen": answer, "rejected": "no", "reward_model": {"ground_truth": answer}}


def variant(folder: Path, name: str) -> Path:
    """A variant of trinity.yaml as a file."""
    base = read_yaml(HERE / "trinity.yaml")
    changes = base.pop("variants")[name]
    path = folder / f"trinity-{name}.yaml"
    path.write_text(yaml.safe_dump(merged(base, changes)))
    return path


def translated(start: Callable[..., Forked], file: Path, *overrides: str) -> Path:
    """What `trivium translate` prints for the file, as a file."""
    command = start("translate", "translate", "--from", "trinity", str(file), *overrides)
    assert command.wait(120) == 0, command.text
    lines = command.text.splitlines()
    path = Path(f"{file.stem}-translated.yaml")
    path.write_text("\n".join(line for line in lines if not line.startswith("note: ")) + "\n")
    return path


def assert_trains(*ended: Forked) -> None:
    """Each ends well; the last of them trained two steps."""
    for command in ended:
        assert command.wait(240) == 0, command.text
    assert '"steps": 2' in ended[-1].text, ended[-1].text


@pytest.mark.parametrize("name", VARIANTS)
def test_two_steps_of_a_config(folder: Path, name: str) -> None:
    with commands(folder) as start:
        assert_trains(start(name, "run", str(translated(start, variant(folder, name)))))


def test_two_steps_of_an_asynchronous_pair(folder: Path) -> None:
    with commands(folder) as start:
        files = [translated(start, variant(folder, name)) for name in ("explorer", "trainer")]
        assert_trains(*[start(file.stem, "run", str(file)) for file in files])


def test_two_steps_of_the_asynchronous_example(folder: Path) -> None:
    names = {name: peer_file("trinity", f"{name}.yaml") for name in PAIR}
    with commands(folder) as start:
        files = [translated(start, file, *SMALL, *PAIR[name]) for name, file in names.items()]
        assert_trains(*[start(file.stem, "run", str(file)) for file in files])


def example(name: str) -> dict[str, Any]:
    config = load_config(peer_file("trinity", f"{name}.yaml"))
    if config.get("explorer", {}).get("auxiliary_models"):
        config.explorer.auxiliary_models = [{"model_path": "model"}]
    return overridden(config, [*SMALL, "mode=both", *EXAMPLES[name]])


@pytest.mark.parametrize("name", EXAMPLES)
def test_two_steps_of_an_example(folder: Path, name: str) -> None:
    summary = run(config_from_mapping(translate(example(name), device="cpu").config))
    assert summary["steps"] == 2


async def test_a_trainer_reads_a_file(folder: Path) -> None:
    trainer = Trainer(example("grpo_gsm8k__gsm8k"))
    trainer.prepare()
    assert (await trainer.train(), trainer.train_step_num) == ("trainer", 2)
    assert trainer.config.algorithm.repeat_times == 2
    await trainer.shutdown()
