"""What bounds a run, and advice that applies to its config."""

from __future__ import annotations

from typing import Any

import pytest

from trivium.config import config_from_mapping
from trivium.monitors.verdict import BOUNDS, verdict

BASE: dict[str, Any] = {
    "run": {"dir": "runs/x"},
    "model": {"kind": "tiny"},
    "tasks": {"train": {"kind": "arithmetic"}},
    "rewards": [{"kind": "exact"}],
}


def advice(kind: str, **sections: Any) -> str:
    """What is advised where this phase takes longest."""
    line = verdict({kind: 1.0}, 2.0, config_from_mapping({**BASE, **sections}))
    return line.partition("; to shorten it, ")[2]


@pytest.mark.parametrize("kind", BOUNDS)
def test_it_names_what_takes_longest_and_what_to_do(kind: str) -> None:
    seconds = {**dict.fromkeys(BOUNDS, 1.0), f"{kind}/policy": 3.0, "train": 90.0, "step": 100.0}
    line = verdict(seconds, 10.0)
    title, choices = BOUNDS[kind]
    assert line.startswith(f"bound by {title}: 40% of the trainer's time, 4.0 of 10.0 s (")
    assert all(each.do in line for each in choices)
    assert line.count("10%") == len(BOUNDS) - 1
    assert "\n" not in line


@pytest.mark.parametrize("kind", BOUNDS)
def test_something_applies_to_every_config(kind: str) -> None:
    assert advice(kind)
    assert advice(kind, train={"lora": {"layers": 2, "push": "adapter"}}, cluster={"kind": "ray"})


@pytest.mark.parametrize(
    ("kind", "text", "with_it", "without"),
    [
        ("update", "bfloat16", {"device": "cuda", "dtype": "float32"}, {"device": "cpu"}),
        ("update", "bfloat16", {"device": "cuda"}, {"device": "cuda", "dtype": "bfloat16"}),
        ("update", "train.lora", {}, {"lora": {"layers": 2}}),
        ("update", "train.lora.layers", {"lora": {}}, {"lora": {"layers": 2}}),
        ("sync", "push adapters", {"lora": {"push": "merged"}}, {"lora": {}}),
    ],
)
def test_advice_of_the_trainer_has_a_condition(
    kind: str, text: str, with_it: dict[str, Any], without: dict[str, Any]
) -> None:
    assert text in advice(kind, train=with_it)
    assert text not in advice(kind, train=without)


def test_advice_of_other_sections_has_a_condition() -> None:
    assert "schedule.max_staleness" in advice("wait")
    assert "schedule.max_staleness" not in advice("wait", schedule={"max_staleness": 2})
    assert "cluster.kind: ray" not in advice("wait", cluster={"kind": "ray"})
    assert "checkpoint.asynchronous" not in advice("checkpoint", checkpoint={"asynchronous": True})
    assert "KL term" not in advice("score", algorithm={"kind": "grpo", "kl": {"coef": 0.0}})
    assert "KL term" in advice("score", algorithm={"kind": "grpo", "kl": {"coef": 0.1}})
    assert "old_log_prob" in advice("score", algorithm={"kind": "grpo", "old_log_prob": "recompute"})
    assert "old_log_prob" not in advice("score", algorithm={"kind": "grpo", "old_log_prob": "rollout"})


def test_advice_for_one_of_several_stages_is_given() -> None:
    stages = [{"train": {"lora": {"layers": 2}}}, {"schedule": {"steps": 3}}]
    assert "train.lora" in advice("update", stages=stages)


def test_what_was_not_measured_is_told_and_small_shares_are_not() -> None:
    line = verdict({"wait": 3.0, "sync": 1.0, "checkpoint": 0.01}, 10.0)
    assert "30% of the trainer's time, 3.0 of 10.0 s (weight sync 10%, loading and the rest 60%)" in line


def test_a_run_in_which_nothing_was_measured_has_no_bound() -> None:
    assert verdict({}, 10.0) == verdict({"wait": 1.0}, 0.0) == "nothing was measured"


def test_what_auto_means_here_counts() -> None:
    from trivium.training.device import has_gpu

    assert ("bfloat16" in advice("update", train={"device": "auto", "dtype": "float32"})) == has_gpu()
