"""Where every reward is 0, GRPO stays as it is; self-distillation and the prediction of observations learn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from configs import tiny_model
from example_counts import FULL
from transformers import AutoModelForCausalLM

from trivium.config import config_from_mapping, merged
from trivium.inspection.run import RecordedRun
from trivium.runtime.launch import run
from trivium.text import hf_tokenizer
from trivium.types import Message, Task, experiences_of

SEEDS = (0, 1, 2) if FULL else (0,)
SUMS = [(a, b) for a in range(5) for b in range(5)]
NOTHING = [{"kind": "regex", "pattern": "never"}]
BASE: dict[str, Any] = {
    "cluster": {"threads": 1},
    "model": tiny_model(alphabet="0123456789+="),
    "engine": {"sampling": {"max_new_tokens": 1}},
    "train": {"optimizer": {"lr": 1e-2}},
    "monitors": [{"kind": "jsonl"}],
}


def trained(run_dir: Path, **sections: Any) -> Path:
    """The policy after a run of these sections."""
    said = merged(BASE, {"run": {"dir": str(run_dir)}, **sections})
    said["model"] = sections.get("model", BASE["model"])
    said["run"] = {"dir": str(run_dir), **sections.get("run", {})}
    run(config_from_mapping(said))
    return next(iter(sorted((run_dir / "checkpoints").glob("step-*"), reverse=True))) / "policy"


def rows(path: Path, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    path.write_text("".join(json.dumps({"id": number, **row}) + "\n" for number, row in enumerate(rows)))
    return {"train": {"kind": "jsonl", "path": str(path), "id": "id"}}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that repeats an answer which it is shown (any digit), and knows no sums."""
    folder = tmp_path_factory.mktemp("reader")
    shown = [{"prompt": f"{a}+{b}={c}", "completion": str(c)} for a, b in SUMS for c in range(10)]
    return trained(
        folder / "run",
        tasks=rows(folder / "shown.jsonl", shown),
        algorithm={"kind": "sft"},
        buffer={"kind": "files"},
        schedule={"steps": 60, "groups_per_step": 50, "group_size": 1},
    )


def accuracy(policy: Path, shown: str = "") -> float:
    """The fraction of the sums whose most probable answer is right; `shown` follows the prompt."""
    tokenizer = hf_tokenizer(policy)
    asked = [[{"role": "user", "content": f"{a}+{b}=" + shown.format(answer=a + b)}] for a, b in SUMS]
    given = torch.tensor(tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False))
    best = AutoModelForCausalLM.from_pretrained(policy)(input_ids=given).logits[:, -1].argmax(-1)
    return float(np.mean([tokenizer.decode([token]) == str(a + b) for (a, b), token in zip(SUMS, best, strict=True)]))


@pytest.mark.parametrize("seed", SEEDS)
def test_self_distillation_learns_what_no_reward_says(reader: Path, tmp_path: Path, seed: int) -> None:
    told = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in SUMS]
    sections = {
        "run": {"seed": seed},
        "model": {"kind": "hf", "path": str(reader)},
        "tasks": rows(tmp_path / "told.jsonl", told),
        "schedule": {"steps": 40, "groups_per_step": 25, "group_size": 2},
    }
    # An average of weights this small forgets how to read the answer.
    context = {"teacher": {"context": "{prompt}{answer}", "weights": "initial"}}
    before = accuracy(reader)
    assert accuracy(reader, "{answer}") > 0.9, "the teacher reads the answer"
    assert before < 0.4
    few = {"schedule": {"steps": 5}}  # no step changes a bit
    plain = trained(tmp_path / "grpo", **merged(sections, {"algorithm": {"kind": "grpo"}, "rewards": NOTHING, **few}))
    assert accuracy(plain) == before
    sdpo = {"algorithm": {"kind": "sdpo", **context}, "rewards": NOTHING}
    sdft = {"algorithm": {"kind": "sdft", **context}}
    for name, algorithm in (("sdpo", sdpo), ("sdft", sdft)):
        assert accuracy(trained(tmp_path / name, **merged(sections, algorithm))) > before + 0.3, name


class Doubling:
    """Answers a digit with its double; nothing is rewarded."""

    def reset(self, task: Task) -> list[Message]:
        return list(task.prompt)

    def step(self, completion: str) -> tuple[list[Message], float, bool]:
        digit = int(completion) if completion.isdigit() else 0
        return [Message("user", f"{digit}+{digit}={2 * digit}")], 0.0, False


@cache
def observation_loss(policy: Path, recorded: Path) -> float:
    """The mean cross-entropy of the observations in the rollouts of another run."""
    model = AutoModelForCausalLM.from_pretrained(policy)
    groups = RecordedRun(recorded).groups
    total = number = 0.0
    for place in groups.of_step(1):
        group = groups.group(place)
        for e in (e for member in group.alive for e in experiences_of(group, member)):
            with torch.no_grad():
                log_prob = model(input_ids=torch.tensor(e.tokens.copy())[None].long()).logits[0].log_softmax(-1)
            places = np.flatnonzero(e.observed)
            total -= float(log_prob[places - 1, e.tokens[places]].sum())
            number += len(places)
    return total / number


@pytest.mark.parametrize("seed", SEEDS)
def test_echo_predicts_the_environment_and_grpo_does_not(tmp_path: Path, seed: int) -> None:
    sections = {
        "run": {"seed": seed},
        "model": tiny_model(alphabet="0123456789+=", max_position=64),
        "tasks": rows(tmp_path / "starts.jsonl", [{"prompt": f"{a}="} for a in range(10)]),
        "workflow": {"kind": "multi_turn", "environment": f"{__file__}:Doubling", "max_turns": 3},
        "schedule": {"steps": 15, "groups_per_step": 8, "group_size": 2},
    }
    held_out = {"kind": "jsonl", "path": str(tmp_path / "starts.jsonl"), "id": "id"}
    evaluated = {"tasks": {"test": held_out}, "evaluation": {"taskset": "test", "observations": True}}
    grpo = {"algorithm": {"kind": "grpo"}, "schedule": {"steps": 5}}  # no step changes a bit
    trained(tmp_path / "held_out", **merged(sections, {"run": {"seed": seed + 100}, **grpo}))
    start = tmp_path / "grpo" / "model"
    plain = trained(tmp_path / "grpo", **merged(merged(sections, evaluated), grpo))
    sections = merged(sections, {"tasks": evaluated["tasks"], "evaluation": {"taskset": "test"}})
    echo = trained(tmp_path / "echo", **merged(sections, {"algorithm": {"kind": "echo", "observation_coef": 1.0}}))

    def curve(run: str, metric: str) -> list[float]:
        rows = map(json.loads, (tmp_path / run / "metrics.jsonl").read_text().splitlines())
        return [row[metric] for row in rows if metric in row]

    before, flat, after = (observation_loss(each, tmp_path / "held_out") for each in (start, plain, echo))
    assert flat == before
    assert after < 0.6 * before
    losses = curve("echo", "train/observation_loss")
    assert losses[-1] < 0.6 * losses[0]
    start, end = curve("echo", "eval/test/observation_loss")
    assert end < 0.6 * start
    assert curve("grpo", "eval/test/observation_loss") == [start, start]
    assert all(count > 0 for count in curve("echo", "eval/test/observation_tokens"))
