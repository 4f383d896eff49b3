"""The real model learns: with all weights from rewards, from rows of one turn and several, from preferences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.real.sections import (
    QUESTIONS,
    REWARD,
    assert_same_model_samples_and_trains,
    changed,
    metrics_of,
    num_tokens,
    questions,
    rows,
    written,
)
from trivium.config import load_config
from trivium.runtime.launch import run

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

ANSWERS = ("salt water, everywhere.", "a ripe pear.", "the baker does.", "frozen rain.")
WORSE = ("The sea is a large body of water.", "An apple is a fruit.", "A baker.", "Snow is white.")


def trained(directory: Path, model: Path, **sections: Any) -> list[dict[str, float]]:
    """The steps of a run in this process."""
    run(load_config(written(directory / "run.yaml", model, **sections)))
    return metrics_of(directory / "run")


def test_grpo_trains_all_weights_from_the_gguf_file(gguf: Path, model: Path, tmp_path: Path) -> None:
    steps = trained(
        tmp_path,
        gguf,
        tasks={"train": questions(tmp_path)},
        rewards=[REWARD],
        algorithm="grpo",
        engine={"sampling": {"max_new_tokens": 12}},
        train={"optimizer": {"lr": 1e-5}},
        schedule={"steps": 2, "groups_per_step": 2, "group_size": 4},
    )
    assert len(steps) == 2
    assert_same_model_samples_and_trains(steps)
    names = changed(model, tmp_path / "run" / "checkpoints" / "step-000002" / "policy")
    assert len(names) == 30 * 9 + 2 + 1, "nine tensors a layer, the table, which the output layer shares, and a norm"


@pytest.mark.parametrize("turns", [1, 2])
def test_supervised_rows_of_one_turn_and_of_several_are_learned(model: Path, turns: int, tmp_path: Path) -> None:
    """The loss is over the last answer and its end of turn, whatever the conversation before it says."""
    before = [("user", "Hello."), ("assistant", "Hi! How can I help?")] if turns == 2 else []
    pairs = zip(QUESTIONS, ANSWERS, strict=True)
    chats = [[*before, ("user", asked), ("assistant", answer)] for asked, answer in pairs]
    content = ({"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats)
    steps = trained(
        tmp_path,
        model,
        tasks={"train": rows(tmp_path / "chats.jsonl", content, prompt="messages", completion="messages")},
        buffer={"kind": "files"},
        algorithm="sft",
        schedule={"steps": 4, "groups_per_step": 4, "group_size": 1},
    )
    losses = [step["train/loss/policy"] for step in steps]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 1
    answers = sum(num_tokens(model, *chat) for chat in chats)
    assert {step["train/tokens"] for step in steps} == {answers}


def test_preferences_move_the_margin_to_the_preferred_completions(model: Path, tmp_path: Path) -> None:
    content = (
        {"prompt": asked, "chosen": answer, "rejected": other}
        for asked, answer, other in zip(QUESTIONS, ANSWERS, WORSE, strict=True)
    )
    steps = trained(
        tmp_path,
        model,
        tasks={"train": rows(tmp_path / "pairs.jsonl", content)},
        buffer={"kind": "files"},
        algorithm="dpo",
        schedule={"steps": 3, "groups_per_step": 4, "group_size": 2},
    )
    margins = [step["train/preference_margin"] for step in steps]
    assert margins[0] == pytest.approx(0, abs=1e-5), "the reference is the policy at first"
    assert margins == sorted(margins)
    assert margins[-1] > 0.1
    assert steps[0]["train/loss/policy"] == pytest.approx(0.6931, abs=1e-3)
    assert steps[-1]["train/loss/policy"] < steps[0]["train/loss/policy"] - 0.02
