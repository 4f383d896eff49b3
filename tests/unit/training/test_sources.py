"""Several sources in one step: its gradient is the sum of those of separate steps, and its metrics are theirs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from configs import configured, problems_of
from episodes import group, turn
from training_parts import VOCABULARY, make_engine, weights, write_model

from trivium.algorithms import GroupAlgorithm
from trivium.config import RunConfig
from trivium.config.sources import source_configs
from trivium.loops import add_scores, experiences, passes, prepare_mini_batch, train_step
from trivium.runtime.build import algorithm_of, explain
from trivium.training.batching import count
from trivium.training.engine import TorchTrainEngine
from trivium.training.learner import MiniBatch
from trivium.types import EXPERT_VERSION, Group, Trajectory

ARITHMETIC = {"kind": "arithmetic"}
GRPO = {"kind": "grpo", "entropy": {"coef": 0.01}, "gates": [{"kind": "top_entropy", "narrow": True}]}
ECHO = {"kind": "echo", "kl": {"coef": 0.1}, "aggregate": "seq-mean-token-mean"}
SOURCES: list[dict[str, Any]] = [
    {"name": "math", "weight": 2, "tasks": ARITHMETIC, "algorithm": GRPO},
    {"name": "tools", "tasks": ARITHMETIC, "algorithm": ECHO, "group_size": 2, "loss_weight": 0.5},
    {"name": "rows", "tasks": ARITHMETIC, "algorithm": {"kind": "sft"}, "completion": "answer"},
]


def config_of(sources: list[dict[str, Any]] = SOURCES, **sections: Any) -> RunConfig:
    schedule = {"groups_per_step": 4, "group_size": 3}
    return configured(**{"tasks": {"train": sources}, "schedule": schedule, **sections})


def episode(slot: int, source: str, members: int) -> Group:
    """Members of one or two turns, or an expert's completion."""
    rng, trajectories = np.random.default_rng(slot), []
    for index in range(members):
        lengths = rng.integers(2, 5, 3)
        first, seen, second = (rng.integers(3, VOCABULARY, n).tolist() for n in lengths)
        turns = [turn([5, 6, slot + 3], first)]
        if source == "tools":
            turns.append(turn([5, 6, slot + 3, *first, *seen], second))
        rewards = {"exact": float(rng.integers(0, 2) + index)}
        if source == "rows":
            turns = [replace(each, policy_version=np.full(len(each.tokens), EXPERT_VERSION)) for each in turns]
            rewards = {}
        trajectories.append(Trajectory(index, tuple(turns), rewards))
    made = group(slot, *trajectories)
    return replace(made, task=replace(made.task, taskset=source))


GROUPS = [
    episode(0, "math", 3),
    episode(1, "rows", 1),
    episode(2, "tools", 2),
    episode(3, "math", 3),
]


def gradient_of(
    engine: TorchTrainEngine, algorithm: GroupAlgorithm, groups: list[Group], shares: int = 1
) -> dict[str, torch.Tensor]:
    """The gradient of the only update of a step, summed over the shares of its rows as over ranks."""
    batch, _ = algorithm.advantages(add_scores(engine, experiences(groups, algorithm)[0], algorithm.needs))
    ((objectives, epoch, mini_batch),) = passes(batch, algorithm, 0)
    prepared = prepare_mini_batch(engine, mini_batch, objectives[0], epoch)
    learner, totals, gradients = engine._learner("policy"), count(prepared, 32), dict[str, torch.Tensor]()
    assert learner.optimizer is not None
    for first in range(shares):
        share = prepared.select(range(first, len(prepared), shares))
        learner._backward(MiniBatch(share, objectives[0], totals, 0))  # pyright: ignore[reportArgumentType]
        for name, p in learner.optimizer.parameters.items():
            if p.grad is not None:
                gradients[name] = gradients.get(name, torch.zeros_like(p)) + p.grad
    learner.optimizer.zero_grad()
    return {name: gradient.detach() for name, gradient in gradients.items()}


@pytest.mark.parametrize("options", [{}, {"max_tokens_per_micro_batch": 12}, {"share_prefix": True}], ids=str)
def test_the_gradient_is_the_sum_of_separate_gradients(options: dict[str, Any], tmp_path: Path) -> None:
    config, model_dir = config_of(), write_model(tmp_path / "model")
    mixed = algorithm_of(config)
    engine = make_engine(model_dir, mixed, dtype="float64", **options)
    found = gradient_of(engine, mixed, GROUPS)
    total = {name: torch.zeros_like(gradient) for name, gradient in found.items()}
    for source, own in zip(SOURCES, source_configs(config).values(), strict=True):
        groups = [each for each in GROUPS if each.task.taskset == source["name"]]
        separate = gradient_of(engine, algorithm_of(own), groups)
        assert max(float(gradient.abs().max()) for gradient in separate.values()) > 1e-3
        for name, gradient in separate.items():
            total[name] += source.get("loss_weight", 1.0) * gradient
    on_ranks = gradient_of(engine, mixed, GROUPS, shares=len(GROUPS))
    for name, gradient in total.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(on_ranks[name], gradient, rtol=1e-9, atol=1e-9)


def test_the_metrics_of_a_source_are_those_of_a_step_of_its_own(tmp_path: Path) -> None:
    config, model_dir = config_of(), write_model(tmp_path / "model")
    mixed = algorithm_of(config)
    metrics = train_step(make_engine(model_dir, mixed, dtype="float64"), GROUPS, mixed)
    compared = set[str]()
    for name, own in source_configs(config).items():
        groups, algorithm = [each for each in GROUPS if each.task.taskset == name], algorithm_of(own)
        separate = train_step(make_engine(model_dir, algorithm, dtype="float64"), groups, algorithm)
        for key, value in separate.items():
            if (of_source := metrics.get(f"source/{name}/{key}")) is not None:
                assert of_source == pytest.approx(value, rel=1e-9, abs=1e-12), key
                compared.add(key)
    assert compared >= {
        "reward/mean",
        "rollout/groups",
        "train/advantage_max",
        "train/kl",
        "train/loss/policy",
        "train/loss_term/observation",
        "train/observation_loss",
        "train/ref_kl",
    }
    assert metrics["rollout/groups"] == 4
    losses = [
        source.get("loss_weight", 1.0) * metrics[f"source/{source['name']}/train/loss/policy"] for source in SOURCES
    ]
    assert metrics["train/loss/policy"] == pytest.approx(sum(losses))


def test_the_mismatch_of_a_source_is_that_before_the_first_update(tmp_path: Path) -> None:
    twice = [{"kind": kind, "mini_batches": 2} for kind in ("grpo", "echo")]
    sources = [
        {"name": name, "tasks": ARITHMETIC, "algorithm": each}
        for name, each in zip(("math", "tools"), twice, strict=True)
    ]
    mixed = algorithm_of(config_of(sources))
    engine = make_engine(write_model(tmp_path / "model"), mixed, dtype="float64")
    groups = [episode(slot, source, members) for slot, source, members in ((0, "math", 3), (1, "math", 3))]
    updates: list[float] = []
    update = engine.update

    def noted(*args: Any) -> Any:
        metrics = update(*args)
        updates.append(metrics["source/math/mismatch/kl"])
        return metrics

    engine.update = noted  # pyright: ignore[reportAttributeAccessIssue]
    metrics = train_step(engine, groups, mixed)
    assert len(updates) == 2
    assert metrics["source/math/mismatch/kl"] == updates[0] != updates[1]


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ("train/kl", "source/math/train/kl"),
        ("mismatch/kl", "source/math/mismatch/kl"),
        ("source/maths/train/kl", "maths"),
        ("source/math/train/nothing", "docs/metrics.md"),
        ("train/loss/policy", ""),
        ("reward/mean", ""),
        ("source/math/train/kl", ""),
    ],
)
def test_a_stage_ends_by_a_metric_that_its_steps_have(metric: str, words: str) -> None:
    schedule = {"groups_per_step": 4, "group_size": 3, "until": {"metric": metric, "above": 1}}
    if not words:
        assert config_of(schedule=schedule).schedule.until
        return
    assert words in problems_of(lambda: config_of(schedule=schedule))["schedule.until.metric"]


def test_a_step_may_lack_groups_of_a_source(tmp_path: Path) -> None:
    algorithm = algorithm_of(config_of())
    engine = make_engine(write_model(tmp_path / "model"), algorithm, dtype="float64")
    metrics = train_step(engine, GROUPS[:1], algorithm)
    assert metrics["train/loss/policy"] == pytest.approx(metrics["source/math/train/loss/policy"])
    assert "source/rows/train/loss/policy" not in metrics
    before = weights(engine)
    assert "train/loss/policy" not in train_step(engine, [], algorithm)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(engine).items())


def test_sources_are_checked_one_by_one() -> None:
    rows = {"name": "rows", "tasks": ARITHMETIC, "completion": "answer"}
    sources = [
        {"name": "math", "tasks": ARITHMETIC, "algorithm": {"kind": "ppo"}},
        {**rows, "group_size": 3, "algorithm": "sft"},
        {**rows, "name": "small", "weight": 0.01, "algorithm": "sft"},
    ]
    problems = problems_of(lambda: config_of(sources, rewards=[]))
    assert "'ppo'" in problems["tasks.train[0].algorithm"]
    assert "exact" in problems["tasks.train[0].rewards"]
    assert "3 trajectories" in problems["tasks.train[1].schedule.group_size"]
    assert "weight" in problems["tasks.train"]
    assert "rewards" not in problems
    unequal = [{**SOURCES[0], "algorithm": {"kind": "grpo", "mini_batches": 2}}, *SOURCES[1:]]
    assert "mini_batches" in problems_of(lambda: config_of(unequal))["tasks.train"]
    no_explorers = problems_of(lambda: config_of(buffer={"kind": "files"}, algorithm={"kind": "sft"}))
    assert "files" in no_explorers["tasks.train"]
    elsewhere = problems_of(lambda: config_of(tasks={"train": ARITHMETIC, "test": SOURCES}))
    assert "train" in elsewhere["tasks.test"]
    limited = [{**SOURCES[0], "workflow": {"kind": "single_turn", "max_concurrent": 2}}, *SOURCES[1:]]
    assert "4096" in problems_of(lambda: config_of(limited))["tasks.train[0].workflow.max_concurrent"]


def test_a_curriculum_of_the_run_needs_rewards_of_the_sources_that_follow_it() -> None:
    sources = [{**SOURCES[0], "rewards": ["exact"]}, SOURCES[2]]
    schedule = {"groups_per_step": 4, "group_size": 3, "curriculum": "success_rate"}
    own = source_configs(config_of(sources, rewards=[], schedule=schedule))
    assert own["math"].schedule.curriculum is not None
    assert own["rows"].schedule.curriculum is None
    without = [{**SOURCES[0], "rewards": []}, SOURCES[2]]
    problems = problems_of(lambda: config_of(without, schedule=schedule))
    assert "rewards" in problems["tasks.train[0].schedule.curriculum"]
    asked = [sources[0], {**SOURCES[2], "curriculum": "success_rate"}]
    assert "tasks.train[1].schedule.curriculum" in problems_of(lambda: config_of(asked, rewards=[], schedule=schedule))


def test_the_explanation_has_a_part_for_each_source() -> None:
    text = explain(config_of())
    for line in ("source math: 2 of 4 groups", "source tools: 1 of 4 groups of a step, 2 trajectories", "source rows"):
        assert line in text
    assert text.count("algorithm ") == 3
