"""Every rule of `trivium doctor` finds what is wrong in a run that does it wrong, small or recorded.

A directory of tests/data/runs has the config of a real run and its metrics; `tools/record_runs.py` records them again.
The demos and `-real` are runs of SmolLM2-135M-Instruct with an adapter, the others of a tiny model that writes sums.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from record_runs import as_rows
from typer.testing import CliRunner

from trivium.algorithms import PerToken, PolicyInputs, policy_loss
from trivium.cli import app
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


GRADED = [time.monotonic()]


def slow(prompt: str, completion: str) -> float:
    """Takes twelve times as long as all else, also on a busy machine: the trainer waits for over 90 % of a step."""
    time.sleep(max(1.05, 12 * min(time.monotonic() - GRADED[-1], 0.8)))
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
RUNS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "nothing is ever right": (
        {
            "rewards": [{"kind": "regex", "pattern": "x", "name": "never"}],
            "algorithm": {"kind": "grpo", "filters": [{"kind": "difficulty"}]},
            "schedule": steps(12),
        },
        {"equal rewards", "truncation", "refused groups"},
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
            "rewards": [{"kind": here("silence")}, {"kind": "regex", "pattern": ".*"}],
            "engine": {"sampling": sampling(16)},
            "train": lr(0.02),
            "schedule": steps(20, groups_per_step=8, group_size=8),
        },
        {"empty completions", "length collapse", "dead component"},
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


# --------------------------------------------------------------------------- recorded runs

RECORDED = Path(__file__).parents[2] / "data" / "runs"
HEALTHY = sorted(path.name for path in RECORDED.glob("healthy-*"))
SICK: dict[str, tuple[str, set[str]]] = {
    "sick-empty": ("empty completions", {"saturated rewards"}),
    "sick-one-answer": ("one answer", {"saturated rewards"}),
    "sick-length": ("reward hacking", {"length explosion", "truncation"}),
    "sick-high-lr": ("falling reward", {"equal rewards", "one answer"}),
    "sick-high-lr-real": ("kl drift", {"equal rewards", "truncation"}),
    "sick-sft-high-lr": ("rising loss", set()),
    "sick-dpo-high-lr": ("entropy collapse", set()),
    "sick-low-lr": ("learning rate too low", set()),
    "sick-zero-reward": ("equal rewards", set()),
    "sick-truncated": ("truncation", set()),
    "sick-broken-real": ("truncation", set()),
    "sick-truncated-real": ("truncation", {"equal rewards"}),
    "sick-stale": ("staleness", {"falling reward", "equal rewards"}),
    "sick-mismatch": ("engine mismatch", set()),
    "sick-entropy": ("entropy collapse", {"equal rewards", "one answer"}),
    "sick-kl": ("kl drift", set()),
}
"""By run: the rule of the illness, and the rules of its consequences."""


def doctor(name: str, run_dir: Path) -> tuple[int, set[str]]:
    """Writes the directory of the run; returns the exit code of the command and the rules that it names."""
    (run_dir / "config.yaml").write_text(f"extends: {RECORDED / name / 'config.yaml'}\n")
    rows = as_rows(json.loads((RECORDED / name / "metrics.json").read_text()))
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    result = CliRunner().invoke(app, ["doctor", str(run_dir)])
    names = {line.partition(": ")[0] for line in result.output.splitlines()}
    return result.exit_code, names & set(RULES.by_name)


@pytest.mark.parametrize("name", HEALTHY)
def test_doctor_is_silent_about_a_healthy_run(name: str, tmp_path: Path) -> None:
    assert doctor(name, tmp_path) == (0, set())


@pytest.mark.parametrize("name", SICK)
def test_doctor_finds_the_illness_of_a_run(name: str, tmp_path: Path) -> None:
    illness, consequences = SICK[name]
    assert doctor(name, tmp_path) == (1, {illness, *consequences})


def test_there_are_ten_of_each_and_none_is_left_out() -> None:
    assert len(HEALTHY) >= 10
    assert len(SICK) >= 10
    assert {path.parent.name for path in RECORDED.glob("*/metrics.json")} == {*HEALTHY, *SICK}


def test_every_rule_has_a_run() -> None:
    found = [expected for _, expected in RUNS.values()] + [{illness, *others} for illness, others in SICK.values()]
    assert set(RULES.by_name) == set.union(*found)
