"""What a new user meets in the first hour, from the outside: through the command line or public Python."""

from __future__ import annotations

import json
import os
import re
import resource
import runpy
import shlex
import shutil
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
import yaml
from openai import BadRequestError, OpenAI, PermissionDeniedError
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.processes import Forked, commands, trivium
from tests.waiting import eventually
from trivium import __file__ as trivium_file
from trivium import __version__
from trivium.cli import app
from trivium.config import config_from_mapping
from trivium.foundation.metrics import depends_on_machine
from trivium.planning.machine import Machine
from trivium.runtime import launch

BASE = """
run: {dir: run}
model: {kind: tiny, alphabet: "0123456789+=", layers: 1, hidden: 16, heads: 2, mlp: 16, max_position: 24}
tasks: {train: {kind: arithmetic, max_operand: 9}}
engine: {sampling: {max_new_tokens: 3}}
train: {optimizer: {lr: 1.0e-3}}
schedule: {steps: 3, groups_per_step: 2, group_size: 4}
checkpoint: {save_every: 1}
monitors: [{kind: jsonl}]
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Forked]]:
    """Starts `trivium` commands in an empty directory that holds base.yaml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(BASE)
    with commands(tmp_path) as begin:
        yield begin


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, without what depends on the machine."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not depends_on_machine(k)} for line in lines]


def weights_of(run_dir: Path) -> dict[str, bytes]:
    """Every tensor file of the checkpoints."""
    return {str(f.relative_to(run_dir)): f.read_bytes() for f in sorted(run_dir.glob("checkpoints/**/*.safetensors"))}


# --------------------------------------------------------------------------- failures, and what a resumed run does

SERVICE = """
from pathlib import Path
from trivium.config import WorkflowConfig

def ask():
    with open("calls", "a") as calls:  # the service goes down in the second step; a reward is also tried before the run
        calls.write(".")
    if Path("calls").stat().st_size > 9 and not Path("repaired").exists():
        raise ConnectionError("the service is down")

def reward(prompt, completion, answer):
    ask()
    return float(len(completion))

def plain(prompt, completion, answer):
    return float(len(completion))

class World:
    class Config(WorkflowConfig):
        pass

    def __init__(self, config):
        pass

    async def run(self, task, policy):
        ask()
        await policy.generate(task.prompt)
"""


@pytest.mark.parametrize(
    ("parts", "retried"),
    [
        ("rewards: [{kind: service.py:reward}]", "2 group(s) are retried; of 2 only rewards failed"),
        (
            "rewards: [{kind: service.py:plain}]\nworkflow: {kind: service.py:World}",
            "2 group(s) are retried; of 0 only rewards failed",
        ),
    ],
    ids=["reward", "environment"],
)
def test_a_run_that_an_outage_ended_continues_once_it_is_over(
    start: Callable[..., Forked], tmp_path: Path, parts: str, retried: str
) -> None:
    (tmp_path / "service.py").write_text(SERVICE)
    (tmp_path / "run.yaml").write_text(f"extends: base.yaml\n{parts}\n")
    for _ in range(2):  # the second time it is down from the start
        failed = start("down", "run", "run.yaml").ended(1)
        assert "ConnectionError: the service is down" in failed.text
        assert "run the same command again" in failed.text
        assert [row["step"] for row in rows_of(tmp_path / "run")] == [1]
    (tmp_path / "repaired").touch()
    start("up", "run", "run.yaml").ended()
    assert retried in (tmp_path / "run" / "log.txt").read_text()
    start("never-down", "run", "run.yaml", "run.dir=other").ended()
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "other")
    assert weights_of(tmp_path / "run") == weights_of(tmp_path / "other")


def test_a_source_is_read_by_the_check_and_by_each_stage(start: Callable[..., Forked], tmp_path: Path) -> None:
    """Not by each of a stage's roles: a large file would be read, and kept, several times."""
    (tmp_path / "mine.py").write_text(
        "def rows(name):\n"
        "    with open('read', 'a') as read: print(name, file=read)\n"
        "    return [{'prompt': f'{n}+1=', 'answer': str(n + 1)} for n in range(8)]\n"
    )
    sections = {
        name: {"kind": "python", "source": "mine.py:rows", "args": {"name": name}} for name in ("train", "test")
    }
    stages = [{"train": {"optimizer": {"lr": lr}}, "schedule": {"steps": 1}} for lr in (1e-3, 2e-3)]
    changes = {"rewards": ["exact"], "tasks": sections, "evaluation": {"taskset": "test"}, "stages": stages}
    (tmp_path / "run.yaml").write_text(f"extends: base.yaml\n{yaml.safe_dump(changes)}")
    start("run", "run", "run.yaml").ended()
    assert Counter((tmp_path / "read").read_text().split()) == {"train": 3, "test": 3}


def test_a_start_that_ended_before_its_first_step_begins_anew_with_a_corrected_config(
    start: Callable[..., Forked], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "def bug(prompt, completion, answer):\n"
        "    if len(completion) < 4: raise KeyError('answr')\n"  # as all of the run are
        "    return 0.0\n"
        "def mine(prompt, completion, answer): return float(len(completion))\n"
    )
    corrected = ("rewards=[{kind: mine.py:mine}]", "schedule.group_size=2", "model.hidden=8")
    failed = start("wrong", "run", "base.yaml", "rewards=[{kind: mine.py:bug}]").ended(1)
    assert "KeyError: 'answr'" in failed.text
    again = start("right", "run", "base.yaml", *corrected).ended()
    assert "it starts again with this config" in again.text
    start("fresh", "run", "base.yaml", *corrected, "run.dir=fresh").ended()
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "fresh")
    assert weights_of(tmp_path / "run") == weights_of(tmp_path / "fresh")
    refused = start("late", "run", "base.yaml", *corrected, "schedule.group_size=4")
    assert refused.wait(120) == 2, "it has made steps by now"
    assert "schedule.group_size: 4" in refused.text


def test_a_run_directory_without_its_config_is_not_continued_by_any(
    start: Callable[..., Forked], tmp_path: Path
) -> None:
    start("first", "run", "base.yaml", "rewards=[{kind: exact}]", "schedule.steps=1").ended()
    config = tmp_path / "run" / "config.yaml"
    text, before = config.read_text(), weights_of(tmp_path / "run")
    for damage, words in ((None, "its config.yaml is missing"), ("run: [", "its config.yaml is damaged")):
        config.unlink(missing_ok=True)
        if damage is not None:
            config.write_text(damage)
        refused = start("another", "run", "base.yaml", "rewards=[{kind: exact}]", "train.optimizer.lr=1.0").ended(1)
        for part in (words, "asked:", "put config.yaml back"):
            assert part in refused.text
    config.write_text(text)
    start("again", "run", "base.yaml", "rewards=[{kind: exact}]", "schedule.steps=2").ended()
    assert before.items() <= weights_of(tmp_path / "run").items()


def test_what_may_change_on_the_way_does_with_change_and_is_marked(
    start: Callable[..., Forked], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("def length(prompt, completion, answer): return float(len(completion))\n")
    text = "extends: base.yaml\nrewards: [{kind: exact}, {kind: mine.py:length}]\nalgorithm: {kl: {coef: 0.1}}\n"
    (tmp_path / "run.yaml").write_text(text)
    (tmp_path / "changed.yaml").write_text(
        text.replace("length}", "length, weight: 3}").replace("0.1", "0.2") + "train: {optimizer: {lr: 0.01}}\n"
    )
    start("begin", "run", "run.yaml", "schedule.steps=1").ended()
    refused = start("refused", "run", "changed.yaml").ended(2)
    assert refused.text.count("pass --change to continue with it") == 3, refused.text
    mixed = start("mixed", "run", "changed.yaml", "--change", "run.seed=1")
    assert mixed.wait(120) == 2, "a seed may not change"
    assert "run.seed" in mixed.text
    assert "optimizer.lr" not in mixed.text
    changed = start("changed", "run", "changed.yaml", "--change", "schedule.steps=2").ended()
    assert "A run that begins with these values gives other bits" in changed.text
    start("continued", "run", "changed.yaml").ended()  # it is the config of the run now

    expected = {
        "rewards[1].weight": [1.0, 3.0],
        "algorithm.kl.coef": [0.1, 0.2],
        "train.optimizer.lr": [1e-3, 0.01],
    }
    record = [{"step": 1, "changes": expected}]
    assert [json.loads(line) for line in (tmp_path / "run" / "changes.jsonl").read_text().splitlines()] == record
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["changes"] == record
    rows = rows_of(tmp_path / "run")
    assert [row.get("train/changed_fields") for row in rows] == [None, 3.0, None]
    assert [row["train/lr/policy"] for row in rows] == [1e-3, 0.01, 0.01]
    assert [row["train/kl_coef"] for row in rows] == [0.1, 0.2, 0.2]
    weights = [row["reward/component/length"] / row["rollout/response_tokens"] for row in rows]
    assert weights[1] > 2 * weights[0]


def test_a_run_goes_on_with_the_limits_that_it_began_with_on_a_machine_of_another_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"kind": "tiny", "layers": 1, "hidden": 16, "heads": 2, "mlp": 16, "max_position": 24}

    def limits_after(steps: int, gib: float, run_dir: str = "run") -> tuple[int, int]:
        monkeypatch.setattr(launch, "machine", lambda: Machine(int(gib * 2**30)))
        config = {
            **yaml.safe_load(BASE),
            "rewards": ["exact"],
            "model": shape,
            "run": {"dir": str(tmp_path / run_dir), "change": True},
        }
        config["schedule"]["steps"] = steps
        launch.run(config_from_mapping(config))
        written = yaml.safe_load((tmp_path / run_dir / "config.yaml").read_text())
        return written["train"]["max_tokens_per_micro_batch"], written["engine"]["max_rows"]

    assert limits_after(1, 64) == limits_after(2, 0.6) != limits_after(1, 0.6, "other")
    memory = json.loads((tmp_path / "run" / "summary.json").read_text())["memory"]
    assert memory["unit"] == "MiB"
    assert 100 < memory["measured"]["host"] < 8 * 1024
    assert 0 < memory["planned"]["host"] < 0.6 * 1024


def test_another_config_goes_on_from_the_weights_of_a_run(start: Callable[..., Forked], tmp_path: Path) -> None:
    start("first", "run", "base.yaml", "rewards=[{kind: exact}]", "schedule.steps=1").ended()
    start("export", "export", "run", "start").ended()
    other = ("model={kind: hf, path: start}", "run.dir=other", "schedule={steps: 1, group_size: 8, groups_per_step: 1}")
    start("second", "run", "base.yaml", "rewards=[{kind: exact}]", "train.optimizer.lr=0", *other).ended()
    weights = [tmp_path / "other" / "checkpoints" / "step-000001" / "policy", tmp_path / "start"]
    assert len({(directory / "model.safetensors").read_bytes() for directory in weights}) == 1


# --------------------------------------------------------------------------- user code that misbehaves

WILD = """
import asyncio, os, sys, time
from trivium.config import WorkflowConfig

class Odd(BaseException):
    pass

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")

async def leave():
    sys.exit(0)

async def stubborn():
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass

def leaves(prompt, completion):
    sys.exit(0)

class Wild:
    class Config(WorkflowConfig):
        how: str = "mixed"

    calls = 0

    def __init__(self, config):
        self.how = config.how

    async def run(self, task, policy):
        Wild.calls += 1
        how = ["plain", "plain", "exit", "interrupt", "odd", "stop", "task", "stubborn", "huge", "unnamed", "mute"]
        how = (how[Wild.calls] if Wild.calls < len(how) else "plain") if self.how == "mixed" else self.how
        await policy.generate(task.prompt)
        return getattr(self, how)() or {"wild": 1.0}

    def plain(self):
        pass

    def exit(self):
        sys.exit(0)

    def interrupt(self):
        raise KeyboardInterrupt

    def odd(self):
        raise Odd("ball")

    def mute(self):
        raise Mute

    def huge(self):
        return {"wild": 1e39}

    def unnamed(self):
        return {5: 1.0}

    def stop(self):
        asyncio.get_running_loop().stop()

    def task(self):
        self.task = asyncio.create_task(leave())

    def stubborn(self):
        self.other = asyncio.create_task(stubborn())

    def cancel(self):
        for task in asyncio.all_tasks():
            task.cancel()

    def vanish(self):
        os._exit(0)

    def block(self):
        time.sleep(3600)
"""


def test_whatever_user_code_raises_or_calls_fails_its_rollout_and_is_shown(
    start: Callable[..., Forked], tmp_path: Path
) -> None:
    (tmp_path / "wild.py").write_text(WILD)
    (tmp_path / "run.yaml").write_text(
        "extends: base.yaml\nworkflow: {kind: wild.py:Wild, max_failed_fraction: 1.0}\nmonitors: [{kind: console}]\n"
    )
    run = start("wild", "run", "run.yaml").ended()
    failures: dict[str, int] = json.loads((tmp_path / "run" / "summary.json").read_text())["failures"]
    log = (tmp_path / "run" / "log.txt").read_text()
    assert sum(failures.values()) == 6
    for kind, line in [("SystemExit", "exit"), ("KeyboardInterrupt", "interrupt"), ("Odd", "odd"), ("Mute", "mute")]:
        (cause,) = [cause for cause in failures if f"{kind} in {line} (" in cause]
        assert re.search(rf"{re.escape(str(tmp_path))}/wild.py:\d+\)$", cause)
        assert run.text.count(f"further ones like it are only counted: {cause}") == 1
        assert re.search(rf"Traceback[\s\S]*wild.py[\s\S]*in {line}\n", log)
    assert failures["reward: RewardError"] == 2
    assert "1e+39, and 1e+09 is the largest that can be used" in run.text
    assert "the workflow named it 5 of type int" in run.text
    shown = re.findall(r"failed (\d+)/(\d+)", run.text)
    assert sum(int(failed) for failed, _ in shown) == 6
    assert {total for _, total in shown} == {"8"}
    assert re.search(
        r"1 task\(s\) ignore their cancellation and are abandoned, in stubborn \(.*wild.py:\d+\)", run.text
    )


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("workflow.how=cancel", 1, "all of its tasks were cancelled, by user code"),
        ("workflow.how=vanish", 0, ""),
        ("rewards=[{kind: exits.py:reward}]", 1, "SystemExit"),
        # 10 s after the deadline
        ("{workflow.how: block, workflow.deadline_s: 0.5}", 1, "block ("),
    ],
    ids=["cancel", "vanish", "import", "block"],
)
def test_a_run_that_user_code_ends_does_not_look_finished(
    start: Callable[..., Forked], tmp_path: Path, how: str, code: int, words: str
) -> None:
    (tmp_path / "wild.py").write_text(WILD)
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "run.yaml").write_text("extends: base.yaml\nworkflow: {kind: wild.py:Wild}\n")
    values = [f"{k}={v}" for k, v in yaml.safe_load(how).items()] if how.startswith("{") else [how]
    run = start("wild", "run", "run.yaml", *values).ended(code)
    assert words in run.text
    assert not (tmp_path / "run" / "summary.json").exists()


# --------------------------------------------------------------------------- damaged files

TWO_STAGES = """
extends: base.yaml
rewards: [exact]
schedule: {steps: 2}
stages:
  - {algorithm: {kind: sft}, buffer: {kind: files}, schedule: {steps: 1, group_size: 1}}
  - {algorithm: {kind: grpo, kl: {coef: 0.01, estimator: k3}}}
"""


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_damaged_files_of_a_run_are_refused_or_repaired_and_it_says_so(
    start: Callable[..., Forked], tmp_path: Path
) -> None:
    """What a run reads when it continues: its model, its checkpoints (one as a reference), its journal."""
    run_dir, whole = tmp_path / "run", tmp_path / "whole"
    (tmp_path / "stages.yaml").write_text(TWO_STAGES)
    start("whole", "run", "stages.yaml").ended()
    weights = weights_of(run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "step-000003")  # of the second stage only the first step is left
    run_dir.rename(whole)

    def resumed(damage: Callable[[], object], *changes: str) -> tuple[int, str]:
        shutil.rmtree(run_dir, ignore_errors=True)
        shutil.copytree(whole, run_dir)
        damage()
        command = start("again", "run", "stages.yaml", *changes)
        return command.wait(120), command.text

    reference = run_dir / "checkpoints" / "step-000001" / "policy" / "model.safetensors"
    code, text = resumed(lambda: flip_bit(reference))
    assert code == 1, text
    assert "policy/model.safetensors is missing or was changed after the save" in text
    code, text = resumed(lambda: flip_bit(run_dir / "model" / "model.safetensors"))
    assert code == 1, text
    assert "found: model.safetensors is missing or was changed after the save" in text
    manifest = run_dir / "checkpoints" / "step-000002" / "manifest.json"
    code, text = resumed(lambda: manifest.write_text('{"files": {}, "step": 2}'))
    assert code == 1, text
    assert "found: manifest.json is damaged" in text
    code, text = resumed(lambda: (run_dir / "config.yaml").write_bytes(b"\x00\xff"))
    assert code == 1, text
    assert "its config.yaml is damaged" in text
    journal = run_dir / "rollouts" / "stage-1" / "step-000003.msgpack"
    (whole / "checkpoints" / "step-abc").mkdir()
    code, text = resumed(lambda: flip_bit(journal))
    assert code == 0, text
    assert "step-000003.msgpack is damaged, or was cut short" in text
    assert weights_of(run_dir) == weights


def limited(*arguments: str) -> None:
    """The command `trivium` on a disk that is full once a file has 20,000 bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    trivium(*arguments)


def test_what_the_machine_refuses_is_said_in_three_parts(start: Callable[..., Forked], tmp_path: Path) -> None:
    bad = {
        "run.dir=/proc/x": "run.dir: write to /proc/x",
        "run.dir=base.yaml": "run.dir: write to base.yaml",
        "train.optimizer.betas=[1.0e+30,0.9]": "train.optimizer.betas",
    }
    started = [
        (start("bad", "run", "base.yaml", "rewards=[exact]", change), problem) for change, problem in bad.items()
    ]
    full = Forked("full", tmp_path / "full.out", limited, "run", "base.yaml", "rewards=[exact]", "model.hidden=64")
    started.append((start("absent", "check", "/"), "found: Is a directory"))
    for command, problem in started:
        assert command.wait(120) == 2, command.text
        assert problem in command.text
        assert "Traceback" not in command.text.partition("asked:")[2]
    assert full.wait(120) == 1, full.text
    assert "asked: write run/" in full.text
    assert "free space" in full.text or "check the permissions" in full.text
    assert "Traceback" not in full.text


# --------------------------------------------------------------------------- check and evaluation


def test_the_tiny_example_learns_and_says_so(start: Callable[..., Forked], tmp_path: Path) -> None:
    """The files of docs/start.md, with the commands that the README lists for a run."""
    pages = [(Path(__file__).parents[2] / page).read_text(encoding="utf-8") for page in ("README.md", "docs/start.md")]
    for name, code in re.findall(r"```(?:python|yaml)\n# (tiny_[\w.]+)[^\n]*\n(.*?)```", pages[1], re.DOTALL):
        (tmp_path / name).write_text(code, encoding="utf-8")
    lines = re.findall(r"^trivium \w+ (?:my_run\.yaml|runs/mine).*", pages[0], re.MULTILINE)
    shown = [
        line.partition("#")[0].replace("my_run", "tiny_run").replace("runs/mine", "runs/tiny").split()
        for line in lines
        if "trivium view" not in line  # which serves until Ctrl-C
    ]
    assert {"check", "explain", "run", "export"} <= {arguments[1] for arguments in shown}
    texts: dict[str, str] = {}
    for arguments in shown:
        command = start(arguments[1], *arguments[1:]).ended(seconds=300)
        texts[arguments[1]] = command.text
    summary = json.loads((tmp_path / "runs" / "tiny" / "summary.json").read_text())
    assert summary["steps"] == 30
    assert summary["reward_before"] < 0.05
    assert summary["reward_after"] > summary["reward_before"] + 0.1
    assert "accuracy_after" not in summary  # the reward is graded
    assert "eval reward" in texts["run"]
    assert "accuracy" not in texts["run"]
    assert "total_steps: 30" in texts["check"]
    assert "advantage" in texts["explain"]
    assert (tmp_path / "out" / "config.json").is_file()


def test_the_python_example_of_the_readme_learns(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    [script] = re.findall(r"```python\n(import trivium\n.*?)```", page, re.DOTALL)
    (tmp_path / "go.py").write_text(f"import sys; sys.path.insert(0, '')\n{script}")
    with chdir(tmp_path):
        command = Forked("script", tmp_path / "out", runpy.run_path, "go.py", {}, "__main__")
    assert command.wait(280) == 0, command.text
    lines = command.text.splitlines()
    assert "runs/from_python: 50 steps" in lines
    before, after, run_dir = lines[-1].split()
    assert (float(before) < 0.1, float(after) > 0.3) == (True, True)
    assert (tmp_path / run_dir / "summary.json").is_file()


def test_the_stages_of_the_page_about_concepts_learn(start: Callable[..., Forked], tmp_path: Path) -> None:
    page = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    (config,) = re.findall(r"```yaml\n# two_stages.yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "two_stages.yaml").write_text(config)
    sums = [(a, b) for a in range(10) for b in range(10)]
    rows = [{"prompt": f"{a}+{b}=", "completion": str(a + b), "answer": str(a + b)} for a, b in sums]
    (tmp_path / "worked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = start("run", "run", "two_stages.yaml").ended(seconds=240)
    begun = [line for line in command.text.splitlines() if line.startswith("stage ")]
    assert begun == ["stage 1 of 2: sft, 20 steps", "stage 2 of 2: grpo, 30 steps"]
    summary = json.loads((tmp_path / "runs" / "two_stages" / "summary.json").read_text())
    assert summary["reward_after"] > summary["reward_before"] + 0.05, summary


BORDER = """
extends: base.yaml
tasks: {test: {kind: arithmetic, max_operand: 9, count: 20}}
rewards: [exact]
evaluation: {taskset: test, every: 2}
schedule: {steps: 2}
stages: [{algorithm: {kind: grpo}}, {algorithm: {kind: rloo}}]
"""


def test_a_policy_is_evaluated_once_between_stages_that_evaluate_alike(
    start: Callable[..., Forked], tmp_path: Path
) -> None:
    (tmp_path / "border.yaml").write_text(BORDER)
    graded = "stages.1.rewards=[{kind: exact, partial_credit: 0.5}]"
    runs = {"alike": ((), [2, 4]), "other": ((graded,), [2, 2, 4]), "rare": (("evaluation.every=0",), [2, 4])}
    for name, (changes, steps) in runs.items():
        start(name, "run", "border.yaml", f"run.dir={name}", *changes).ended()
        evaluated = [row for row in rows_of(tmp_path / name) if "eval/test/reward" in row]
        assert [row["step"] for row in evaluated] == steps
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert summary["reward_before"] == evaluated[-2]["eval/test/reward"]
        assert summary["reward_after"] == evaluated[-1]["eval/test/reward"]


def test_a_reward_that_returns_text_is_told_once(start: Callable[..., Forked], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def judged(completion): return 'good' if len(completion) < 9 else 0.0\n")
    command = start("run", "run", "base.yaml", "rewards=[{kind: mine.py:judged}]").ended(1)
    assert command.text.count("do: fix the reward: this trajectory is left out") == 1
    assert command.text.count("asked: a finite number from reward 'judged'") == 1
    assert "the reward: RewardError: a finite number from reward 'judged'" in command.text, "the error names its cause"


def test_prompts_that_are_too_long_are_counted_before_the_run(start: Callable[..., Forked], tmp_path: Path) -> None:
    prompts = ["1+1=", "2+3=", "+".join("111111111111=")]
    rows = [json.dumps({"prompt": prompt, "answer": "2"}) + "\n" for prompt in prompts]
    (tmp_path / "sums.jsonl").write_text("".join(rows))
    changes = "tasks={train: {kind: jsonl, path: sums.jsonl}}", "rewards=[exact]", "schedule.steps=1"
    for name in ("check", "run"):
        command = start(name, name, "base.yaml", *changes).ended()
        assert "tasks.train: prompts that leave space for a completion" in command.text
        assert "1 of 3 do not" in command.text
    assert "1 of 3 do not" in (tmp_path / "run" / "log.txt").read_text()


def test_a_run_that_cannot_begin_leaves_nothing(start: Callable[..., Forked], tmp_path: Path) -> None:
    command = start("run", "run", "base.yaml", "rewards=[exact]", "engine.max_context=3", "engine.device=cuda").ended(2)
    assert "engine.device: cuda" in command.text
    assert "95 of 95" in command.text or "81 of 81" in command.text or "100 of 100" in command.text
    assert not (tmp_path / "run").exists()


def test_a_base_model_is_trained_and_exported_with_the_template_of_the_config(
    start: Callable[..., Forked], tmp_path: Path
) -> None:
    start("run", "run", "base.yaml", "rewards=[exact]", "schedule.steps=1").ended()
    (tmp_path / "run" / "model").rename(tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").unlink()
    (tmp_path / "hf.yaml").write_text("extends: base.yaml\nrun: {dir: other}\nmodel: {kind: hf, path: base}\n")
    refused = start("check", "check", "hf.yaml", "rewards=[exact]").ended(2)
    assert "set model.chat_template" in refused.text
    changes = "rewards=[exact]", "schedule.steps=1", "model.chat_template=plain"
    for arguments in (("check", "hf.yaml", *changes), ("run", "hf.yaml", *changes), ("export", "other", "out")):
        start(arguments[0], *arguments).ended()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    conversation = [{"role": "user", "content": "1+1="}]
    assert tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True) == "1+1="


# --------------------------------------------------------------------------- serving

SERVED = """
extends: base.yaml
run: {mode: serve}
model: {alphabet: "0123456789?!", max_position: 32}
tasks: {train: {kind: served}}
engine: {sampling: {max_new_tokens: 1}}
schedule: {steps: 2, groups_per_step: 1, group_size: 2, max_staleness: 1}
monitors: [{kind: console}]
cluster: {threads: 1}
serve: {port: 0, key_variable: AGENT_KEY}
"""


def with_few_descriptors(*arguments: str) -> None:
    """`trivium` in a process that may open 450 files."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (450, 450))
    trivium(*arguments)


def address_of(server: Forked, run_dir: Path) -> str:
    """Where the server listens, once it has weights."""

    def address() -> str:
        path = run_dir / "serve.json"
        shown = json.loads(path.read_text()) if path.is_file() else {"pid": None}
        return shown["url"] if shown["pid"] == server.pid else ""

    eventually(lambda: bool(address()), 120, lambda: server.text, server)
    url = address()
    eventually(lambda: httpx.get(f"{url}/health").json()["loaded"], 120, lambda: server.text, server)
    return url


def served_episode(client: OpenAI, task: str, session: str) -> None:
    """A rollout whose first feedback no journal could hold."""
    labels: dict[str, Any] = {"task_id": task, "session": session, "secret": "mine"}
    messages: Any = [{"role": "user", "content": "1?"}]
    client.chat.completions.create(model="policy", messages=messages, extra_body=labels)
    for poison in ({"reward": 1e39}, {"reward": 1, "columns": {"x": 2**70}}, {"rewards": {"": 1}}):
        with pytest.raises(BadRequestError):
            client.post("/feedback", body={**labels, **poison}, cast_to=object)
    with pytest.raises(PermissionDeniedError):
        client.post("/feedback", body={**labels, "secret": "yours", "reward": 0}, cast_to=object)
    client.post("/feedback", body={**labels, "reward": float(session)}, cast_to=object)


def test_a_served_run_outlives_its_visitors_and_serves_its_final_policy(
    start: Callable[..., Forked], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENT_KEY", "swordfish")
    (tmp_path / "agents.yaml").write_text(SERVED)
    server = Forked("server", tmp_path / "server.out", with_few_descriptors, "run", "agents.yaml", "--linger", "600")
    visitors: list[socket.socket] = []
    try:
        url = address_of(server, tmp_path / "run")
        eventually(lambda: f"serving policy at {url}" in server.text, 120, lambda: server.text, server)
        assert httpx.get(f"{url}/health").json()["loaded"], "it is announced when it answers"
        at = httpx.URL(url)
        for _ in range(420):
            visitors.append(socket.create_connection((at.host, at.port or 0)))
            visitors[-1].send(b"GET /health HTTP/1.1\r\nX-Half: ")
        with OpenAI(base_url=f"{url}/v1", api_key="swordfish", max_retries=5) as client:
            said: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "1?"}]}
            with pytest.raises(BadRequestError, match="temperature"):
                client.chat.completions.create(**said, temperature=1e-45, extra_body={"evaluation": True})
            for step in range(2):
                for session in ("0", "1"):
                    served_episode(client, f"task {step}", session)
            eventually(lambda: httpx.get(f"{url}/health").json()["status"] == "final", 120, lambda: server.text, server)
            assert client.chat.completions.create(**said).system_fingerprint == "version-2"
        os.kill(server.pid, signal.SIGINT)
        assert server.wait(120) == 130
    finally:
        server.kill()
        for visitor in visitors:
            visitor.close()
    assert (tmp_path / "run" / "checkpoints" / "step-000002" / "manifest.json").is_file()
    assert "serving the final policy, version 2" in server.text
    assert len(server.text) < 20_000
    assert "Traceback" not in (tmp_path / "run" / "log.txt").read_text()
    start("again", "run", "agents.yaml").ended()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2


def without_fastapi(*arguments: str) -> None:
    """`trivium` where the extra `serve` is not installed."""
    sys.modules["fastapi"] = None  # type: ignore[assignment]
    trivium(*arguments)


def test_an_endpoint_that_cannot_be_served_is_refused(
    start: Callable[..., Forked], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agents.yaml").write_text(SERVED)
    monkeypatch.setenv("AGENT_KEY", "")
    for command in ("check", "run"):
        keyless = start(command, command, "agents.yaml").ended(2, seconds=60)
        assert "export AGENT_KEY=..." in keyless.text
    open_to_all = start("open", "check", "agents.yaml", "serve.host=0.0.0.0", "serve.key_variable=null").ended(
        2, seconds=60
    )
    assert "serve.key_variable: serve.host '0.0.0.0' without a key" in open_to_all.text
    bare = Forked(
        "bare", tmp_path / "bare.out", without_fastapi, "run", "agents.yaml", "serve.key_variable=null"
    ).ended(2, seconds=60)
    assert "pip install 'trivium[serve]'" in bare.text


# --------------------------------------------------------------------------- Python and console

ROOT = Path(__file__).parents[2]

CELLS = """
async def cells():
    config["run"] = {"dir": "runs/sums"}
    config["schedule"] = {"steps": 1, "groups_per_step": 2, "group_size": 2}
    trivium.run(config, rewards=[close, {"kind": lambda prompt, completion: 1.0, "name": "one"}], tasks=rows)
    config["schedule"]["steps"] = 2
    try:
        trivium.run(config, rewards=[close, {"kind": lambda prompt, completion: 1.0, "name": "one"}], tasks=rows[1:])
    except trivium.foundation.errors.ConfigError as error:
        print(error)
    trivium.run(config, rewards=[close, {"kind": lambda prompt, completion: 1.0, "name": "one"}], tasks=rows)


import asyncio
asyncio.run(cells())
"""


def test_functions_and_rows_of_a_notebook_are_trained_on_and_recorded(tmp_path: Path) -> None:
    """The examples of README and docs/python.md, called as in a notebook: within an event loop, and to continue."""
    readme, page = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/python.md"))
    blocks = [
        re.search(pattern, text, re.S)
        for pattern, text in (
            (r"```python\n(import trivium\n.*?)summary = ", readme),
            (r"```python\n# sums.py\n(.*?)if __name__", page),
        )
    ]
    short, long = (block.group(1) for block in blocks if block is not None)
    (tmp_path / "sums.py").write_text(f"import sys; sys.path.insert(0, '')\n{short}\n{long}\n{CELLS}")
    with chdir(tmp_path):
        script = Forked("script", tmp_path / "out", runpy.run_path, "sums.py", {}, "__main__")
    assert script.wait(240) == 0, script.text
    assert "tasks.train.digest" in script.text, "other rows are refused"
    assert "cells.<locals>.<lambda> has no importable name" in script.text, script.text
    run_dir = tmp_path / "runs" / "sums"
    recorded = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert [reward["kind"] for reward in recorded["rewards"]] == ["__main__:close", "__main__:cells.<locals>.<lambda>"]
    assert Path(recorded["tasks"]["train"]["path"]).parent == run_dir / "tasks"
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["reward/component/one"]) for row in rows] == [(1, 1.0), (2, 1.0)]


def test_the_console_says_where_the_run_is(start: Callable[..., Forked], tmp_path: Path) -> None:
    console = (
        "run",
        "base.yaml",
        "monitors=[console, jsonl]",
        "schedule.steps=2",
        "evaluation={taskset: train}",
        "rewards=[exact]",
    )
    command = start("first", *console).ended(seconds=240)
    lines = command.text.splitlines()
    lines = lines[lines.index("run: 2 steps") :]
    assert re.fullmatch(r"trains on cpu \(\d+ threads\) in float32: policy of [\d,]+ parameters, all trained", lines[1])
    assert re.match(r"step 0/2  .*accuracy", lines[2])
    assert re.match(r"step 1/2 .* tokens/s [\d,]+  seconds [\d.]+  left \d:\d\d$", lines[3])
    again = start("again", *console).ended(seconds=240)
    assert "already complete: 2 steps" in again.text


def test_the_version_in_python_and_on_the_command_line(tmp_path: Path) -> None:
    command = Forked("version", tmp_path / "out", trivium, "--version")
    assert (command.wait(120), command.text.split()) == (0, ["trivium", __version__])
    assert (Path(trivium_file).parent / "py.typed").is_file()


# --------------------------------------------------------------------------- reward models, preferences, rollouts

SUMS = """
run: {dir: DIR}
model: {kind: tiny, alphabet: "0123456789+=", layers: 1, hidden: 32, heads: 2, mlp: 64, max_position: 24}
cluster: {threads: 1}
train: {optimizer: {lr: 1.0e-2}}
monitors: [{kind: jsonl}]
"""
PAIRS = """
tasks: {train: {kind: jsonl, path: pairs.jsonl}}
buffer: {kind: files}
algorithm: {kind: reward_model}
schedule: {steps: 12, groups_per_step: 16, group_size: 2}
"""


def sums(folder: Path, name: str, text: str) -> str:
    """The path of a config over rows of small numbers (preferred) and large ones."""
    rows = [{"prompt": f"{a}+{b}=", "chosen": str(a % 5), "rejected": str(9 - b % 3)} for a in range(8) for b in (1, 7)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    path = folder / f"{name}.yaml"
    path.write_text(SUMS.replace("DIR", str(folder / name)) + text, encoding="utf-8")
    return str(path)


def test_a_trained_reward_model_is_exported_and_rewards_another_run(
    tmp_path: Path, start: Callable[..., Forked]
) -> None:
    def ends(code: int, *arguments: str) -> str:
        command = start("trivium", *arguments).ended(code)
        return command.text

    ends(0, "run", sums(tmp_path, "judge", PAIRS))
    run, out = str(tmp_path / "judge"), str(tmp_path / "out")
    said = ends(1, "export", run, out)  # nobody trained the policy
    assert "its policy is the initial model" in said
    assert "--role reward" in said
    ends(0, "export", run, out, "--role", "reward")
    unexported = f"rewards: [{{kind: model, path: {run}/checkpoints/step-000012/reward}}]"
    rl = "tasks: {train: {kind: jsonl, path: pairs.jsonl}}\nengine: {sampling: {max_new_tokens: 2}}\n"
    rl += "schedule: {steps: 8, groups_per_step: 8, group_size: 4}\n"
    ends(0, "check", sums(tmp_path, "unexported", rl + unexported))
    without = f"rewards: [{{kind: model, path: {run}/checkpoints/step-000012/policy}}]"
    assert "--role reward" in ends(2, "check", sums(tmp_path, "wrong", rl + without))
    ends(0, "run", sums(tmp_path, "policy", f"{rl}rewards: [{{kind: model, path: {out}}}]"))
    assert "trained: policy" in ends(1, "export", str(tmp_path / "policy"), str(tmp_path / "x"), "--role", "reward")
    rows = rows_of(tmp_path / "policy")
    assert rows[-1]["reward/component/model"] > rows[0]["reward/component/model"]
    tokenizer, model = AutoTokenizer.from_pretrained(out), AutoModelForSequenceClassification.from_pretrained(out)
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "3+7="}, {"role": "assistant", "content": completion}], tokenize=False
        )
        for completion in ("3", "9")
    ]
    chosen, rejected = model(**tokenizer(texts, return_tensors="pt", add_special_tokens=False)).logits[:, 0]
    assert chosen > rejected


BROKEN_REWARD = """
def digits(prompt, completion):
    if completion.startswith("+"):
        raise KeyError("no plus")
    return float(completion.isdecimal())
"""


def test_rollouts_are_shown_with_their_tokens_and_why_they_failed(tmp_path: Path, start: Callable[..., Forked]) -> None:
    def ends(code: int, *arguments: str) -> str:
        command = start("trivium", *arguments).ended(code)
        return command.text

    (tmp_path / "mine.py").write_text(BROKEN_REWARD)
    (tmp_path / "config.yaml").write_text(BASE + "rewards: [{kind: mine.py:digits}]\n")
    ends(0, "run", "config.yaml", "run.keep=tokens", "workflow.max_failed_fraction=1", "train.optimizer.lr=1.0e-6")
    rows = [json.loads(line) for line in ends(0, "rollouts", "run", "--step", "2", "--json").splitlines()]
    assert len(rows) == 8
    assert {tuple(row["steps"]) for row in rows} == {(2,)}
    for row in rows:
        (sequence,), trained = row["sequences"], row["failure"] is None
        lengths = {len(values) for values in sequence.values()}
        assert lengths == {len(sequence["tokens"])}
        assert ("advantages" in sequence) == trained
        assert "".join(sequence["text"]).startswith(f"<|user|>{row['prompt'][0]['content']}<|end|><|assistant|>")
        assert set(row["rewards"]) == ({"digits"} if trained else set())
    failed = ends(0, "rollouts", "run", "--failed")
    counted = sum(row["rollout/failed"] for row in rows_of(tmp_path / "run"))
    assert failed.count("failed: reward: RewardError:") == counted > 0
    assert "KeyError: 'no plus'" in failed
    task = rows[0]["task_id"]
    text = ends(0, "rollouts", "run", "--task", task, "--tokens")
    assert f"task {task} (train)" in text
    assert "advantages" in text
    assert "steps 1 to 3" in ends(1, "rollouts", "run", "--step", "7")


# --------------------------------------------------------------------------- documents and examples


def test_the_commands_of_the_documents_exist() -> None:
    """Every `trivium` line of a code block names a command, options that it has, and keys of the config."""
    commands: Any = typer.main.get_command(app)
    keys = {line.split("`")[1] for line in (ROOT / "docs" / "config.md").read_text().splitlines() if line[:3] == "| `"}
    lines = [
        line
        for page in [ROOT / "README.md", *sorted({*(ROOT / "docs").glob("*.md")} - {ROOT / "docs" / "mistakes.md"})]
        for block in re.findall(r"```\w*\n(.*?)```", page.read_text(), re.DOTALL)
        for line in block.splitlines()
        if line.startswith("trivium ")
    ]
    assert len(lines) > 20
    for line in lines:
        command, *words = shlex.split(line, comments=True)[1:]
        if command.startswith("-"):
            continue
        if command == "translate":
            assert words[0] == "--from", line
            assert words[1] in ("verl", "trinity", "trl"), line
            continue  # what follows are another trainer's keys and flags
        options = {name for option in commands.commands[command].params for name in option.opts}
        assert {word for word in words if word.startswith("-")} <= options, line
        for key in (word.partition("=")[0] for word in words if re.match(r"[a-z]+\.[a-z_.]+=", word)):
            section = key.partition(".")[0] in ("tasks", "stages", "model")
            assert section or any(f"{each}.".startswith(f"{key}.") for each in keys), line


def test_the_values_to_start_from_pass_check(start: Callable[..., Forked], tmp_path: Path) -> None:
    page = (ROOT / "docs" / "hyperparameters.md").read_text()
    values = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0])
    del values["engine"]["sampling"]["max_new_tokens"]  # the tiny model has no room for so many
    (tmp_path / "start.yaml").write_text(yaml.safe_dump({"extends": "base.yaml", "rewards": ["exact"], **values}))
    start("check", "check", "start.yaml").ended(seconds=60)
