"""Configs of Trinity-RFT's shape, translated and run by the command line on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.peers import peer_file
from tests.processes import Forked, commands
from trivium.config import merged, read_yaml
from trivium.text.tiny import TinyModel

HERE = Path(__file__).parent
VARIANTS = ("grpo", "off_policy", "ppo", "mix", "sft", "dpo")
TINY = (
    "model.max_model_len=512",
    "model.max_response_tokens=4",
    "algorithm.repeat_times=2",
    "buffer.total_steps=2",
    "monitor.monitor_type=tensorboard",
)
"""What makes an example small."""
PEERS = {
    "grpo_gsm8k__gsm8k": ("buffer.batch_size=2",),
    "grpo_lora_gsm8k__gsm8k": ("buffer.batch_size=2",),
    "opmd_gsm8k__opmd_gsm8k": ("buffer.batch_size=2",),
    "ppo_countdown__countdown": ("buffer.batch_size=2", "buffer.explorer_input.taskset.path=numbers.jsonl"),
    "mix_math__mix_math": ("buffer.batch_size=2", "buffer.train_batch_size=5"),
    "dpo_humanlike__dpo": ("buffer.train_batch_size=4", "buffer.trainer_input.experience_buffer.path=talks.jsonl"),
}
PAIR = {"async_gsm8k__explorer": ("buffer.batch_size=2",), "async_gsm8k__trainer": ("buffer.train_batch_size=4",)}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and rows, where the examples' environment leads; the working directory."""
    config = TinyModel.Config(layers=1, hidden=16, heads=2, mlp=16, max_position=512)
    TinyModel(config, seed=0).materialize(tmp_path / "model")
    rows = [_row(a, b) for a in range(4) for b in range(4)]
    for name in ("rows", "talks"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    numbers = {"question": "1 and 2 make 3", "answer": json.dumps({"target": 3, "numbers": [1, 2]})}
    (tmp_path / "numbers.jsonl").write_text(json.dumps(numbers) + "\n")
    for name, value in {
        "TRINITY_MODEL_PATH": "model",
        "TRINITY_TASKSET_PATH": "rows.jsonl",
        "TRINITY_SFT_DATASET_PATH": "talks.jsonl",
        "TRINITY_CHECKPOINT_ROOT_DIR": "runs",
        "HF_HUB_OFFLINE": "1",
    }.items():
        monkeypatch.setenv(name, value if name == "HF_HUB_OFFLINE" else str(tmp_path / value))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _row(a: int, b: int) -> dict[str, Any]:
    question, answer = f"{a}+{b}=", f"so\n#### {a + b}"
    talk = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    pair = {"prompt": question, "chosen": answer, "rejected": "no"}
    return {"question": question, "problem": question, "answer": answer, "messages": talk, **pair}


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


@pytest.mark.parametrize("name", PEERS)
def test_two_steps_of_an_example(folder: Path, name: str) -> None:
    file = peer_file("trinity", f"{name}.yaml")
    with commands(folder) as start:
        assert_trains(start(name, "run", str(translated(start, file, *TINY, *PEERS[name]))))


def test_two_steps_of_the_asynchronous_example(folder: Path) -> None:
    names = {name: peer_file("trinity", f"{name}.yaml") for name in PAIR}
    with commands(folder) as start:
        files = [translated(start, file, *TINY, *PAIR[name]) for name, file in names.items()]
        assert_trains(*[start(file.stem, "run", str(file)) for file in files])


def test_an_example_is_translated_as_it_is(folder: Path) -> None:
    names = [*PEERS, *PAIR]
    files = [peer_file("trinity", f"{name}.yaml") for name in names]
    with commands(folder) as start:
        for file in files:
            assert yaml.safe_load(translated(start, file).read_text())["schedule"]["steps"] >= 1
