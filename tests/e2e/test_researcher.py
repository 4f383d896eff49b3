"""A researcher with rows, preferences, an environment and an agent of their own, in the order of the guides.

Configs and code are the blocks of the pages, and what a command line names stands in the text of a guide: nothing that
only the code knows.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIConnectionError, APIStatusError, AsyncOpenAI

from tests.processes import Forked, commands
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
GENERATED = {"algorithms.md", "config.md", "metrics.md", "mistakes.md", "models.md"}
GUIDES = [ROOT / "README.md", *sorted(page for page in (ROOT / "docs").glob("*.md") if page.name not in GENERATED)]
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in GUIDES)
WORDS = set(re.findall(r"[\w-]+", TEXT))
SUMS = [(a, b) for a in range(10) for b in range(10)]


@pytest.fixture
def trivium(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Forked]]:
    """Starts a command whose words the guides have, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGENT_KEY", "swordfish")
    with commands(tmp_path) as start:

        def documented(*arguments: str) -> Forked:
            names = [part for word in arguments for part in re.split(r"[.=/]", word.partition("=")[0])]
            assert [name for name in names if name and not name.isdecimal() and name not in WORDS] == []
            return start(arguments[0], *arguments)

        yield documented


def block(page: str, name: str) -> str:
    """The code of a page that begins with the comment `# name`."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    (code,) = re.findall(rf"```\w+\n(# {re.escape(name)}\b.*?)```", text, re.DOTALL)
    return code


def write(page: str, *names: str) -> None:
    for name in names:
        Path(name).write_text(block(page, name), encoding="utf-8")


def write_rows(name: str, rows: list[dict[str, Any]]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def ended(command: Forked, code: int = 0) -> str:
    assert command.wait(240) == code, command.text
    return command.text


def rows_of(run_dir: str) -> list[dict[str, Any]]:
    path = Path(run_dir) / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def test_the_guides_are_enough(trivium: Callable[..., Forked]) -> None:
    stages_on_rows_and_tasks(trivium)
    interruption_and_change(trivium)
    preferences_over_the_exported_policy(trivium)
    an_environment(trivium)
    an_agent_that_is_served(trivium)


SHORT = ("stages.0.schedule.steps=10", "stages.1.schedule.steps=8", "checkpoint.save_every=2")


def stages_on_rows_and_tasks(trivium: Callable[..., Forked]) -> None:
    """concepts.md: supervised steps on the researcher's rows, then GRPO; operate.md: Ctrl-C in the second stage."""
    write("concepts.md", "two_stages.yaml")
    write_rows(
        "worked.jsonl", [{"prompt": f"{a}+{b}=", "completion": str(a + b), "answer": str(a + b)} for a, b in SUMS]
    )
    assert "total_steps: 18" in ended(trivium("check", "two_stages.yaml", *SHORT))
    running = trivium("run", "two_stages.yaml", *SHORT)
    eventually(lambda: any(row["step"] == 12 for row in rows_of("runs/two_stages")), 240, lambda: running.text, running)
    os.kill(running.pid, signal.SIGINT)
    assert "same command" in ended(running, 130)
    assert "stage 2 of 2: grpo, 8 steps" in running.text


def interruption_and_change(trivium: Callable[..., Forked]) -> None:
    """operate.md: the same command continues, a changed rate needs `--change`; then its rollouts and its policy."""
    ended(trivium("run", "two_stages.yaml", *SHORT))
    steps = [row["step"] for row in rows_of("runs/two_stages") if "train/loss/policy" in row]
    assert steps == [*range(1, 19)], "no step is lost, none is repeated"
    longer = (SHORT[0], "stages.1.schedule.steps=10", SHORT[2], "stages.1.train.optimizer.lr=1e-4")
    assert "pass --change to continue with it" in ended(trivium("run", "two_stages.yaml", *longer), 2)
    ended(trivium("run", "two_stages.yaml", *longer, "--change"))
    summary = json.loads(Path("runs/two_stages/summary.json").read_text())
    (change,) = summary["changes"]
    assert (summary["steps"], change["step"]) == (20, 18)
    assert list(change["changes"].values()) == [[3e-4, 1e-4]]
    assert summary["reward_after"] > 0.05
    (row, *_) = ended(trivium("rollouts", "runs/two_stages", "--step", "20", "--json")).splitlines()
    assert json.loads(row)["steps"] == [20]
    ended(trivium("doctor", "runs/two_stages"))
    ended(trivium("export", "runs/two_stages", "start"))


def preferences_over_the_exported_policy(trivium: Callable[..., Forked]) -> None:
    """sft-and-preferences.md: DPO on pairs, from what the first run left."""
    write("sft-and-preferences.md", "my_dpo.yaml")
    write_rows(
        "pairs.jsonl", [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": f"={a}"} for a, b in SUMS[:32]]
    )
    ended(trivium("run", "my_dpo.yaml", "schedule.steps=6"))
    losses = [row["train/loss/policy"] for row in rows_of("runs/dpo") if "train/loss/policy" in row]
    assert losses[-1] < losses[0]


def an_environment(trivium: Callable[..., Forked]) -> None:
    """extend-workflow.md: turns with an environment, on rows with the column that it reads."""
    write("extend-workflow.md", "doubling.py", "doubling_run.yaml")
    write_rows("numbers.jsonl", [{"prompt": str(number), "start": number} for number in range(1, 9)])
    ended(trivium("run", "doubling_run.yaml", "schedule.steps=2"))
    assert [row["step"] for row in rows_of("runs/doubling")] == [1, 2]
    assert all("workflow/env_done" in row and not row["rollout/failed"] for row in rows_of("runs/doubling"))


def an_agent_that_is_served(trivium: Callable[..., Forked]) -> None:
    """serve.md: the page's config, and its code as the agent."""
    write("serve.md", "agents.yaml")
    page = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(labels = .*?)```", page, re.DOTALL)
    server = trivium("run", "agents.yaml", "schedule.steps=2", "serve.port=0")
    address = Path("runs/agents/serve.json")
    eventually(address.is_file, 120, lambda: server.text, server)
    url = json.loads(address.read_text())["url"]
    eventually(lambda: httpx.get(f"{url}/health").json()["loaded"], 120, lambda: server.text, server)

    async def episode(task: int, member: int) -> None:
        own = code.replace("http://127.0.0.1:8000", url).replace("larger than 3", f"task {task}")
        own = own.replace("agent 7, round 2", f"agent {task}.{member}")
        compiled = compile(own, "serve.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        try:
            await eval(compiled, {"AsyncOpenAI": AsyncOpenAI, "os": os})
        except APIConnectionError:  # the training is over, and so is the server
            assert server.wait(120) == 0, server.text
        except APIStatusError as error:
            if error.status_code not in (410, 503):  # too stale, or the training is over
                raise

    async def agents() -> None:
        for first in range(0, 6, 2):
            await asyncio.gather(*(episode(task, member) for task in (first, first + 1) for member in range(4)))

    asyncio.run(agents())
    ended(server)
    assert [row["step"] for row in rows_of("runs/agents") if "reward/mean" in row] == [1, 2]


def test_a_word_that_no_guide_has_is_noticed(trivium: Callable[..., Forked]) -> None:
    with pytest.raises(AssertionError, match="secretly"):
        trivium("run", "two_stages.yaml", "train.secretly=1")
