"""Every rule of `trivium doctor` finds what is wrong in a small run that does it wrong."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from trivium.algorithms import PerToken, PolicyInputs, policy_loss
from trivium.config import config_from_mapping
from trivium.engines.torch.engine import TorchEngine
from trivium.foundation.errors import TriviumError
from trivium.inspection.doctor import diagnose
from trivium.monitors.health import RULES
from trivium.runtime.launch import run

# --------------------------------------------------------------------------- parts that spoil a run


def low(prompt: str, completion: str) -> float:
    """Half of the tasks cannot be solved."""
    return float(completion.startswith(("0", "1", "2", "3", "4")) and prompt.startswith(("0", "1", "2", "3", "4")))


def length(prompt: str, completion: str) -> float:
    """Pays for length what no right answer has."""
    return 0.9 * len(completion) / 16


def one_sum() -> list[dict[str, str]]:
    return [{"prompt": "3+4=", "answer": "7"}]


def noise(prompt: str, completion: str) -> float:
    return float(sum(map(ord, prompt + completion)) % 7) / 6


def ungradable(prompt: str, completion: str) -> float:
    if completion.startswith(("0", "1", "2")):
        raise ValueError("cannot be graded")
    return 1.0


def silence(prompt: str, completion: str) -> float:
    return 0.5 * (not completion) + 0.5 * prompt.startswith("9")


def seven(prompt: str, completion: str) -> float:
    return float(completion.startswith("7"))


GRADED = [time.monotonic()]


def slow(prompt: str, completion: str) -> float:
    """Takes twice as long as all else, also on a busy machine."""
    time.sleep(max(1.05, 2 * min(time.monotonic() - GRADED[-1], 5.0)))
    GRADED.append(time.monotonic())
    return noise(prompt, completion)


@policy_loss(formula="A log(log_prob - 1)", source="a mistake", needs={"advantages"}, on_policy="none: not finite")
def not_finite(x: PolicyInputs) -> PerToken:
    return PerToken(x.advantages * (x.log_prob - 1).log())


class Rounded(TorchEngine):
    """Holds the weights in too few bits."""

    async def load(
        self, version: int, weights: Iterable[tuple[str, torch.Tensor]], *, in_flight: str = "finish"
    ) -> None:
        await super().load(version, [(name, (2 * x).round() / 2) for name, x in weights], in_flight=in_flight)


# --------------------------------------------------------------------------- runs


def here(name: str) -> str:
    return f"{__file__}:{name}"


def lr(rate: float) -> dict[str, Any]:
    return {"optimizer": {"lr": rate}}


def sampling(max_new_tokens: int, **further: float) -> dict[str, Any]:
    return {"max_new_tokens": max_new_tokens, **further}


def steps(number: int, **further: Any) -> dict[str, Any]:
    return {"steps": number, "groups_per_step": 3, "group_size": 4, **further}


BASE: dict[str, Any] = {
    "model": {"kind": "tiny", "alphabet": "0123456789+=", "layers": 1, "hidden": 16, "heads": 2, "max_position": 32},
    "cluster": {"threads": 1},
    "tasks": {"train": {"kind": "arithmetic", "max_operand": 9}},
    "rewards": [{"kind": here("low")}],
    "engine": {"sampling": sampling(2)},
    "schedule": steps(6),
    "monitors": [{"kind": "jsonl"}],
}
HACKED: dict[str, Any] = {
    "tasks": {**BASE["tasks"], "test": {"kind": "arithmetic", "max_operand": 9, "count": 60}},
    "rewards": [{"kind": "exact"}, {"kind": here("length")}],
    "engine": {"sampling": sampling(16)},
    "evaluation": {"taskset": "test", "threshold": 1.0, "sampling": sampling(16, temperature=0.0)},
    "stages": [
        {
            "buffer": {"kind": "files"},
            "algorithm": {"kind": "sft"},
            "train": lr(0.02),
            "schedule": {"steps": 24, "groups_per_step": 32, "group_size": 1},
        },
        {"train": lr(0.02), "schedule": steps(15, groups_per_step=8, group_size=8), "evaluation": {"every": 5}},
    ],
}
RUNS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "nothing is ever right": (
        {
            "rewards": [{"kind": "regex", "pattern": "x", "name": "never"}],
            "algorithm": {"kind": "grpo", "filters": [{"kind": "difficulty"}]},
            "schedule": steps(12),
        },
        {"equal rewards", "truncation", "refused groups"},
    ),
    "a learning rate that is too high": (
        {
            "rewards": [{"kind": here("low")}, {"kind": "regex", "pattern": ".*"}],
            "algorithm": {"kind": "grpo", "kl": {"coef": 1e-4}},
            "train": lr(0.1),
            "schedule": steps(18, groups_per_step=4, group_size=8),
        },
        {"entropy collapse", "equal rewards", "kl drift", "dead component"},
    ),
    "a policy that forgets": (
        {
            **HACKED,
            "rewards": [{"kind": "exact", "partial_credit": 0.5}],
            "engine": {"sampling": sampling(4)},
            "evaluation": {"taskset": "test", "sampling": sampling(4, temperature=0.0)},
            "stages": [HACKED["stages"][0], {"train": lr(0.3), "schedule": steps(6, groups_per_step=8, group_size=8)}],
        },
        {"falling reward"},
    ),
    "a learning rate that is too low": (
        {"train": lr(1e-9), "schedule": steps(10, groups_per_step=8, group_size=8)},
        {"learning rate too low"},
    ),
    "supervised steps that diverge": (
        {
            "buffer": {"kind": "files"},
            "rewards": [{"kind": "exact"}],
            "algorithm": {"kind": "sft"},
            "train": lr(1.0),
            "schedule": steps(10, groups_per_step=16, group_size=1),
        },
        {"rising loss"},
    ),
    "everything that can be graded is right": (
        {
            "rewards": [{"kind": here("ungradable")}],
            "workflow": {"max_failed_fraction": 1.0},
            "engine": {"sampling": sampling(10, temperature=0.01)},
        },
        {"saturated rewards", "failures", "duplicated rollouts"},
    ),
    "several epochs over old rollouts": (
        {
            "rewards": [{"kind": here("noise")}],
            "algorithm": {"kind": "grpo", "epochs": 8},
            "train": lr(0.05),
            "schedule": steps(6, max_staleness=3, deterministic=True),
        },
        {"clip fraction", "staleness"},
    ),
    "an engine with other weights": (
        {
            "run": {"keep": "tokens"},
            "algorithm": {"kind": "grpo", "old_log_prob": "recompute"},
            "engine": {"kind": here("Rounded"), "sampling": sampling(4)},
        },
        {"engine mismatch"},
    ),
    "a reward that pays for something else": (HACKED, {"reward hacking", "length explosion", "truncation"}),
    "tasks learned by heart": (
        {
            "tasks": {
                "train": {"kind": "python", "source": here("one_sum")},
                "test": {"kind": "arithmetic", "max_operand": 9, "count": 60},
            },
            "rewards": [{"kind": "exact"}],
            "train": lr(0.01),
            "schedule": steps(50, group_size=16),
            "evaluation": {"taskset": "test", "sampling": sampling(2, temperature=0.0)},
        },
        {"generalization gap"},
    ),
    "a reward that silence earns": (
        {
            "rewards": [{"kind": here("silence")}],
            "engine": {"sampling": sampling(16)},
            "train": lr(0.02),
            "schedule": steps(20, groups_per_step=8, group_size=8),
        },
        {"empty completions", "length collapse"},
    ),
    "a reward that one answer earns": (
        {
            "rewards": [{"kind": here("seven")}],
            "engine": {"sampling": sampling(1)},
            "train": lr(0.02),
            "schedule": steps(20, groups_per_step=4, group_size=8),
        },
        {"one answer", "saturated rewards"},
    ),
    "a slow reward": ({"rewards": [{"kind": here("slow")}], "schedule": steps(5)}, {"waiting"}),
    "a loss that is not a number": (
        {"algorithm": {"kind": "grpo", "policy_loss": {"kind": here("not_finite")}}},
        {"not finite"},
    ),
    "weights that overflow": ({"train": lr(1e30)}, {"not finite"}),
    "rewards that always fail": (
        {"rewards": [{"kind": here("ungradable")}], "workflow": {"max_failed_fraction": 0.1}, "schedule": steps(4)},
        {"ended by an error"},
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_doctor_finds_what_is_wrong_with(name: str, tmp_path: Path) -> None:
    changed, expected = RUNS[name]
    config = {**BASE, **changed, "run": {**changed.get("run", {}), "dir": str(tmp_path / "run")}}
    fails = expected == {"ended by an error"} or "overflow" in name
    with pytest.raises((TriviumError, ExceptionGroup)) if fails else nullcontext():
        run(config_from_mapping(config))
    found = {finding.where: str(finding) for finding in diagnose(tmp_path / "run").findings}
    assert expected <= set(found), found
    log = (tmp_path / "run" / "log.txt").read_text()
    for rule in expected - {"duplicated rollouts", "ended by an error"} if not fails else ():
        assert log.count(f": {rule}: ") == 1  # it was a warning while the run went on
    for rule, text in TEXTS.get(name, {}).items():
        assert text in found[rule]


TEXTS = {
    "an engine with other weights": {"engine mismatch": "worst at token "},
    "weights that overflow": {"not finite": "train/lr/policy 1e+30"},
    "a loss that is not a number": {"not finite": "train/loss/policy is nan at step 1"},
    "rewards that always fail": {"ended by an error": "cannot be graded"},
    "a slow reward": {"waiting": "schedule.max_staleness"},
}
"""What the findings of some of them say."""


def test_every_rule_has_a_run() -> None:
    assert set(RULES.by_name) == set.union(*(expected for _, expected in RUNS.values()))
