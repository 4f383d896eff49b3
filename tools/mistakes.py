"""docs/mistakes.md: typical mistakes of users, the errors that the command line prints, and the fixes.

Each mistake is a change of one small config, and so is its fix. The page holds what `trivium check` prints; the tests
compare it with the code, and check that every fix works.
"""

from __future__ import annotations

import functools
import io
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from typer.main import get_command

from trivium.cli import app
from trivium.config import config_from_mapping
from trivium.text.tiny import TinyModel

BASE = """run: {dir: runs/mine}
model: {kind: tiny, alphabet: "0123456789+=", layers: 1, hidden: 16, heads: 2, mlp: 16, max_position: 24}
tasks: {train: {kind: jsonl, path: sums.jsonl}, test: {kind: jsonl, path: sums.jsonl}}
rewards: [rewards.py:close]
engine: {sampling: {max_new_tokens: 4}}
train: {optimizer: {lr: 1.0e-3}}
schedule: {steps: 2, groups_per_step: 2, group_size: 4}
evaluation: {taskset: test}
monitors: [jsonl]
"""

FILES = {
    "sums.jsonl": '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+3=", "answer": "5"}\n',
    "questions.jsonl": '{"question": "1+1=", "answer": "2"}\n',
    "no_answers.jsonl": '{"prompt": "1+1="}\n{"prompt": "2+3="}\n',
    "broken.jsonl": '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+3=", "answer"\n',
    "long.jsonl": '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+3=", "answer": "5"}\n'
    '{"prompt": "1+1+1+1+1+1+1+1+1+1+1+1=", "answer": "12"}\n',
    "words.jsonl": '{"prompt": "one + 1 =", "answer": "2"}\n{"prompt": "2+3=", "answer": "5"}\n',
    "rewards.py": """def close(prompt, completion, answer):
    return 1.0 / (1.0 + abs(int(completion) - int(answer))) if completion.isdecimal() else 0.0

def graded(prompts, completions, answer):
    return [close(prompt, text, answer) for prompt, text in zip(prompts, completions)]

def forgets(prompt, completion, answer):
    score = float(completion == answer)

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)
""",
    "indent.yaml": "schedule:\n  steps: 3\n group_size: 4\n",
    "twice.yaml": "extends: base.yaml\nschedule: {steps: 3}\nschedule: {group_size: 8}\n",
}
"""The files beside the config."""


@dataclass(frozen=True)
class Mistake:
    """A change of the base config that does not work, and one that does."""

    title: str
    wrong: str = ""
    """YAML that overrides the base config."""
    right: str = ""
    """YAML of the fix, instead of `wrong`."""
    arguments: Sequence[str] = ()
    """Further arguments on the command line."""
    fixed_arguments: Sequence[str] = ()
    config: str = "run.yaml"
    """The config file on the command line, where it is not the changed base config."""
    warns: bool = False
    """Whether the command only warns."""
    prepare: Sequence[str] = field(default=())
    """Arguments of an earlier run in the same directory."""


MISTAKES = (
    # --- the file and the command line
    Mistake("A key that is misspelled", "schedule: {group_sise: 8}", "schedule: {group_size: 8}"),
    Mistake("A section that is misspelled", "shedule: {group_size: 8}", "schedule: {group_size: 8}"),
    Mistake("A key of verl's", "actor_rollout_ref: {rollout: {n: 8}}", "schedule: {group_size: 8}"),
    Mistake("A key of TRL's", "train: {learning_rate: 1.0e-5}", "train: {optimizer: {lr: 1.0e-5}}"),
    Mistake("A key of peft's", "model: {lora: {r: 8}}", "train: {lora: {rank: 8}}"),
    Mistake("A value instead of a section", "run: runs/other", "run: {dir: runs/other}"),
    Mistake(
        "A config value as a command-line option", arguments=("--steps", "3"), fixed_arguments=("schedule.steps=3",)
    ),
    Mistake(
        "A command-line option of another trainer",
        arguments=("--learning_rate=1e-5",),
        fixed_arguments=("train.optimizer.lr=1e-5",),
    ),
    Mistake("An override without a value", arguments=("schedule.steps",), fixed_arguments=("schedule.steps=3",)),
    Mistake("An empty section to remove a section", arguments=("evaluation={}",), fixed_arguments=("evaluation=null",)),
    Mistake(
        "An index that a list does not have",
        arguments=("rewards.1.weight=0.5",),
        fixed_arguments=("rewards.0.weight=0.5",),
    ),
    Mistake("A config file that does not exist", config="my_run.yaml"),
    Mistake("A config that is not YAML", config="indent.yaml"),
    Mistake("A key given twice", config="twice.yaml"),
    # --- rewards
    Mistake("A reward file that does not exist", "rewards: [reward.py:close]", "rewards: [rewards.py:close]"),
    Mistake("A reward function that is misspelled", "rewards: [rewards.py:clsoe]", "rewards: [rewards.py:close]"),
    Mistake("A reward written for TRL", "rewards: [rewards.py:graded]", "rewards: [rewards.py:close]"),
    Mistake("A reward written for verl", "rewards: [rewards.py:compute_score]", "rewards: [exact]"),
    Mistake("A reward that returns nothing", "rewards: [rewards.py:forgets]", "rewards: [rewards.py:close]"),
    Mistake(
        "A column that the reward needs is missing in the data",
        "tasks: {train: {path: no_answers.jsonl}}",
        "tasks: {train: {path: sums.jsonl}}",
    ),
    Mistake("No reward", "rewards: []", "rewards: [exact]"),
    # --- data
    Mistake(
        "A data file that does not exist", "tasks: {train: {path: data.jsonl}}", "tasks: {train: {path: sums.jsonl}}"
    ),
    Mistake("A line that is not JSON", "tasks: {train: {path: broken.jsonl}}", "tasks: {train: {path: sums.jsonl}}"),
    Mistake(
        "The prompt is in a column of another name",
        "tasks: {train: {path: questions.jsonl}}",
        "tasks: {train: {path: questions.jsonl, prompt: question}}",
    ),
    Mistake("No rows to train on", "tasks: {train: {skip: 2}}", "tasks: {train: {skip: 1}}"),
    Mistake("All prompts are too long", "engine: {max_context: 6}", "engine: {max_context: 24}"),
    Mistake(
        "Some prompts are too long",
        "tasks: {train: {path: long.jsonl}}",
        "tasks: {train: {path: long.jsonl, limit: 2}}",
        warns=True,
    ),
    Mistake(
        "Characters outside the alphabet of a tiny model",
        "tasks: {train: {path: words.jsonl}}",
        "tasks: {train: {path: words.jsonl}}\nmodel: {alphabet: ascii}",
        warns=True,
    ),
    # --- the model and the machine
    Mistake("A model that does not exist", "model: {kind: hf, path: qwen}", "model: {kind: hf, path: tiny}"),
    Mistake(
        "A base model, without a chat template",
        "model: {kind: hf, path: base}",
        "model: {kind: hf, path: base, chat_template: plain}",
    ),
    Mistake("A model with soft-capped logits", "model: {kind: hf, path: capped}", "model: {kind: hf, path: tiny}"),
    Mistake("A context longer than the model's", "engine: {max_context: 4096}", "engine: {max_context: 24}"),
    Mistake("A GPU on a machine that has none", "engine: {device: cuda}", "engine: {device: cpu}"),
    Mistake("A run directory that cannot be created", "run: {dir: sums.jsonl/run}", "run: {dir: runs/other}"),
    Mistake(
        "Another config in the directory of an earlier run",
        "run: {dir: runs/earlier}\nschedule: {group_size: 8}",
        "run: {dir: runs/other}\nschedule: {group_size: 8}",
        prepare=("run.dir=runs/earlier", "schedule.steps=1"),
    ),
    # --- what cannot learn
    Mistake("GRPO with groups of one", "schedule: {group_size: 1}", "schedule: {group_size: 4}"),
    Mistake("Greedy rollouts", "engine: {sampling: {temperature: 0}}", "engine: {sampling: {temperature: 1.0}}"),
    Mistake(
        "Router replay for a model without experts",
        "train: {router_replay: rollout}",
        'train: {router_replay: "off"}',
    ),
    Mistake("An algorithm that is misspelled", "algorithm: grop", "algorithm: grpo"),
    Mistake(
        "algorithm.kind ppo with GRPO's advantages",
        "algorithm: {kind: ppo, advantage: {kind: grpo}}",
        "algorithm: {kind: grpo}",
        warns=True,
    ),
    Mistake("Supervised training on rollouts", "algorithm: sft", "algorithm: raft"),
    Mistake(
        "A teacher's path without the key `path`",
        "algorithm: {kind: distill, teacher: tiny}",
        "algorithm: {kind: distill, teacher: {path: tiny}}\nmodel: {kind: hf, path: tiny}",
    ),
    # --- evaluation
    Mistake(
        "An evaluation on a taskset that does not exist", "evaluation: {taskset: tset}", "evaluation: {taskset: test}"
    ),
    Mistake(
        "Several greedy samples of a task",
        "evaluation: {samples: 4, sampling: {temperature: 0}}",
        "evaluation: {samples: 4}",
    ),
    Mistake(
        "A best checkpoint by a metric that is not measured",
        "checkpoint: {keep_best: accuracy}",
        "checkpoint: {keep_best: eval/test/accuracy}",
    ),
    # --- several processes
    Mistake(
        "Explorer and trainer as two commands with a buffer in memory",
        "run: {mode: explore}",
        'run: {mode: explore}\nbuffer: {kind: sql, url: "sqlite:///buffer.db"}\nsync: {method: checkpoint}',
    ),
    Mistake(
        "sync.interval larger than schedule.max_staleness allows",
        "sync: {interval: 4}",
        "sync: {interval: 4}\nschedule: {max_staleness: 3}",
    ),
)

HEAD = """# Typical mistakes

Generated from the code by `make docs`. Each change below is a mistake in this config (`base.yaml`):

```yaml
{base}```

`trivium check` prints the error below it. `trivium run` prints the same error before its first step. Exit code 0:
success, perhaps with warnings; 1: the run failed, or its directory cannot be used; 2: invalid config or command line.
"""


@dataclass(frozen=True)
class Outcome:
    """The output of the command line for a mistake and for its fix."""

    exit_code: int
    text: str
    fixed_code: int
    fixed_text: str
    run_code: int
    """The exit code of `trivium run`, where `trivium check` refuses the config."""
    run_text: str


@functools.cache
def outcomes() -> Mapping[str, Outcome]:
    """Title -> outcome of every mistake, tried in a folder of its own on a machine without GPUs."""
    hidden = {name: os.environ.pop(name, None) for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")}
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        with tempfile.TemporaryDirectory() as folder, chdir(folder), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _prepare(Path(folder).resolve())
            return {mistake.title: _outcome(mistake, Path(folder).resolve()) for mistake in MISTAKES}
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        os.environ.update({name: value for name, value in hidden.items() if value is not None})


def _prepare(folder: Path) -> None:
    """Config, data, rewards, and models: one that works, one without chat template, one with soft-capped logits."""
    for name, text in {**FILES, "base.yaml": BASE}.items():
        (folder / name).write_text(text, encoding="utf-8")
    model = config_from_mapping(yaml.safe_load(BASE), folder).model
    assert isinstance(model, TinyModel.Config)
    for name in ("tiny", "base", "capped"):
        TinyModel(model, seed=0).materialize(folder / name)
    (folder / "base" / "chat_template.jinja").unlink()
    config = folder / "capped" / "config.json"
    config.write_text(config.read_text().replace("{", '{"final_logit_softcapping": 30.0,', 1))


def _outcome(mistake: Mistake, folder: Path) -> Outcome:
    if mistake.prepare:
        code, text = _trivium(folder, "run", "base.yaml", *mistake.prepare)
        assert code == 0, text
    _lay_over(mistake.right, folder)
    fixed = _trivium(folder, "check", "run.yaml", *mistake.fixed_arguments)
    _lay_over(mistake.wrong, folder)
    wrong = mistake.config, *mistake.arguments
    code, text = _trivium(folder, "check", *wrong)
    return Outcome(code, text, *fixed, *(_trivium(folder, "run", *wrong) if code else (0, text)))


def _lay_over(change: str, folder: Path) -> None:
    (folder / "run.yaml").write_text(f"extends: base.yaml\n{change}\n", encoding="utf-8")


def _trivium(folder: Path, *arguments: str) -> tuple[int, str]:
    """(exit code, what is written to stderr, without the folder's name)."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as written:
        try:
            _command()(arguments, "trivium")
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return code, written.getvalue().replace(f"{folder}/", "")


@functools.cache
def _command() -> Callable[..., Any]:
    """Made once, of the signatures of all commands: `typer.testing` makes it for each call, in 40 CPU ms."""
    return get_command(app).main


def mistakes_page() -> str:
    """docs/mistakes.md."""
    parts = [HEAD.format(base=BASE)]
    for mistake in MISTAKES:
        outcome = outcomes()[mistake.title]
        parts.append(f"## {mistake.title}\n")
        parts.append(_shown(mistake.wrong, mistake.config, mistake.arguments))
        parts.append(f"Exit code {outcome.exit_code}:\n\n```text\n{outcome.text.rstrip()}\n```\n")
        if mistake.right or mistake.fixed_arguments:
            parts.append("Instead:\n\n" + _shown(mistake.right, "run.yaml", mistake.fixed_arguments))
    return "\n".join(parts)


def _shown(change: str, config: str, arguments: Sequence[str]) -> str:
    if change:
        return f"```yaml\n{change}\n```\n"
    written = f"```yaml\n{FILES[config]}```\n\n" if config in FILES else ""
    return f"{written}```text\ntrivium check {' '.join([config, *arguments])}\n```\n"
