"""Distillation through a whole run: nobody judges, and the policy comes to speak like the teacher."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from trivium.config import config_from_mapping
from trivium.runtime.launch import run
from trivium.text import hf_tokenizer
from trivium.text.tiny import TinyModel

STEPS = 15
ALPHABET = "0123456789+="
PROMPTS = [f"{a}+{b}=" for a in range(10) for b in range(10)]


def tiny(alphabet: str = ALPHABET) -> dict[str, Any]:
    return {
        "kind": "tiny",
        "alphabet": alphabet,
        "layers": 1,
        "hidden": 32,
        "heads": 2,
        "mlp": 64,
        "max_position": 24,
        "tied": False,
    }


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another random model with firm opinions: its output layer is three times as large."""
    directory = TinyModel(TinyModel.Config(**tiny()), seed=7).materialize(tmp_path_factory.mktemp("teacher") / "model")
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(3)
    model.save_pretrained(directory)
    return directory


def train(run_dir: Path, algorithm: dict[str, Any], **changes: Any) -> list[dict[str, float]]:
    """The rows of the metrics of a run without any reward."""
    said: dict[str, Any] = {
        "run": {"dir": str(run_dir)},
        "cluster": {"threads": 1},
        "model": tiny(),
        "tasks": {"train": {"kind": "arithmetic", "max_operand": 9}},
        "engine": {"sampling": {"max_new_tokens": 4}},
        "algorithm": algorithm,
        "train": {"optimizer": {"lr": 1e-2}},
        "schedule": {"steps": STEPS, "groups_per_step": 32, "group_size": 2},
        "monitors": [{"kind": "jsonl"}],
    }
    run(config_from_mapping(said | changes))
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def divergence(policy: Path, teacher: Path) -> float:
    """The mean over prompts of KL(policy, teacher) for the first token of a reply, in nats: enumerated, not sampled."""
    tokenizer = hf_tokenizer(teacher)
    asked = [[{"role": "user", "content": text}] for text in PROMPTS]
    given = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(path)(input_ids=torch.tensor(given)).logits[:, -1].log_softmax(-1)
        for path in (policy, teacher)
    )
    return float((ours.exp() * (ours - theirs)).sum(-1).mean().detach())


@pytest.mark.parametrize(
    "algorithm",
    [
        {"kind": "distill"},
        {"kind": "distill_top_k"},
        {"kind": "distill_top_k", "policy_loss": {"direction": "forward"}},
    ],
    ids=lambda said: said["kind"] + said.get("policy_loss", {}).get("direction", ""),
)
def test_the_policy_comes_to_speak_like_the_teacher(tmp_path: Path, teacher: Path, algorithm: dict[str, Any]) -> None:
    top = {"top_k": 6} if algorithm["kind"] == "distill_top_k" else {}
    rows = train(tmp_path / "run", {**algorithm, "teacher": {"path": str(teacher), **top}})
    assert len(rows) == STEPS
    assert not [key for key in rows[-1] if key.startswith("reward/")]
    assert all(row["rollout/failed"] == 0 for row in rows)
    before, after = (sum(row["train/teacher_kl"] for row in part) / 3 for part in (rows[:3], rows[-3:]))
    assert after < before / 2
    trained = tmp_path / "run" / "checkpoints" / f"step-{STEPS:06d}" / "policy"
    assert divergence(trained, teacher) < divergence(tmp_path / "run" / "model", teacher) / 2


def test_expert_replies_can_be_distilled_as_well(tmp_path: Path, teacher: Path) -> None:
    rows = train(
        tmp_path / "run",
        {"kind": "distill_top_k", "teacher": {"path": str(teacher), "top_k": 6}},
        buffer={"kind": "files"},
        schedule={"steps": 6, "groups_per_step": 32, "group_size": 1},
    )
    assert rows[-1]["train/teacher_kl"] < rows[0]["train/teacher_kl"] / 1.5
