"""`trivium chat`: conversations with the policy of a run, or with a model directory. No reward is computed.

The engine, the chat template and the system message are those of the run. A conversation keeps the tokens of its
completions, as a rollout of several turns does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trivium.checkpoint.store import CheckpointStore
from trivium.config import RunConfig, build, config_from_mapping, load_config, parse_override
from trivium.config.checks import CONFIG_RULES
from trivium.config.reading import overlaid
from trivium.config.saved import config_file
from trivium.config.schema import WorkflowConfig
from trivium.foundation.concurrency import Turns, gather_or_cancel, wait_for
from trivium.foundation.errors import ConfigError, DataError, DeadlineExceeded, RolloutError, RunDirError, TriviumError
from trivium.foundation.phases import activity, progress
from trivium.foundation.randomness import SampleKey
from trivium.models.backbone.huggingface import missing_model_error
from trivium.monitors.console import shown
from trivium.policy import Policy, PromptTooLong
from trivium.protocols import Progress, Renderer, RolloutEngine, StreamingEngine
from trivium.runtime.build import build_engine
from trivium.runtime.checkpoint_eval import stage_at
from trivium.runtime.main_loop import run_in_loop
from trivium.tasks.concatenation import Sources
from trivium.tasks.files import JsonlTasks
from trivium.types import Message, Prompt, Sampling, StopReason, Task, Turn, with_system

NEW = "/new"
"""The line that begins a new conversation."""
_WITHOUT = tuple(CONFIG_RULES.by_name)
"""A chat neither trains nor reads rows: files of tasks may be gone."""
Write = Callable[[str], None]


@dataclass
class ChatModel:
    """A loaded model, and the conversation with it."""

    name: str
    about: str
    """Describes its settings."""
    engine: RolloutEngine
    renderer: Renderer
    sampling: Sampling
    system: str | None
    seed: int
    limits: WorkflowConfig
    """Its `deadline_s` bounds each completion, its `max_concurrent` how many are sampled at once."""
    policy: Policy = field(init=False)

    def begin(self, number: int) -> Policy:
        """Begins a new conversation, whose number selects its random numbers."""
        key = SampleKey(self.seed, "chat", "chat", str(number))
        self.policy = Policy(self.engine, self.renderer, self.sampling, key, self.engine.max_context)
        return self.policy

    def prompted(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        return with_system(messages, self.system) if self.system else messages

    async def answer(self, text: str, write: Write) -> str:
        """Continues the conversation. `write` gets the completion, in parts if the engine reports tokens. Returns why
        it is cut or empty. Raises PromptTooLong if the conversation fills the context."""
        part = _Written(self.renderer.decode, write) if isinstance(self.engine, StreamingEngine) else None
        messages = self.prompted((*self.policy.history, Message("user", text)))
        turn = await self._generate(self.policy, messages, part)
        write(turn.text.removeprefix(part.text if part else "") + "\n")
        if turn.stop_reason is not StopReason.LENGTH:
            return "" if turn.text.strip() else "(an empty completion)"
        full = len(turn.prompt_tokens) + len(turn.tokens) >= self.engine.max_context
        return "(cut: the context is full)" if full else f"(cut: --max-new-tokens is {self.sampling.max_new_tokens})"

    async def _generate(self, policy: Policy, messages: tuple[Message, ...], progress: Progress | None = None) -> Turn:
        deadline_s = self.limits.deadline_s
        try:
            return await wait_for(deadline_s, policy.generate(messages, progress=progress))
        except TimeoutError as error:
            do = f"lower --max-new-tokens, or raise the deadline: workflow.deadline_s={2 * deadline_s:g}"
            raise DeadlineExceeded(
                f"a completion of {self.name}", f"not finished within {deadline_s:g} s", do
            ) from error

    def rows(self, tasks: Sequence[Task]) -> list[dict[str, Any]]:
        """A JSON row for each task: its columns, model and prompt, and completion and stop_reason, or error."""

        turns = Turns(self.limits.max_concurrent)

        async def row(number: int, task: Task) -> dict[str, Any]:
            messages = self.prompted(task.prompt)
            prompt = [message.entry() for message in messages]
            try:
                async with turns:
                    turn = await self._generate(self.begin(number), messages)
                result = {"completion": turn.text, "stop_reason": turn.stop_reason}
            except RolloutError as error:
                result = {"error": str(error)}
            progress()
            return {**task.columns, "model": self.name, "prompt": prompt, **result}

        with shown(Path(self.name)), activity("completions", len(tasks)):
            completed = gather_or_cancel(row(number, task) for number, task in enumerate(tasks))
            return run_in_loop(completed, self.limits.deadline_s)


class _Written:
    """Writes a completion while it is sampled (`trivium.protocols.Progress`)."""

    def __init__(self, decode: Callable[[Sequence[int]], str], write: Write) -> None:
        self._decode, self._write, self._tokens, self.text = decode, write, list[int](), ""

    def begin(self, prompt: Prompt) -> None:
        """Writes nothing: the user knows the prompt."""

    def add(self, tokens: Sequence[int], log_probs: Sequence[float]) -> None:
        self._tokens += tokens
        text = self._decode(self._tokens)
        if text.startswith(self.text) and not text.endswith("\ufffd"):  # the next token may complete a character
            self._write(text.removeprefix(self.text))
            self.text = text


def typed() -> Iterator[str]:
    """The lines of standard input; in a terminal, with a prompt."""
    in_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if in_terminal and find_spec("readline") is not None:
        import_module("readline")  # input() then has editing and a history
    with suppress(EOFError):
        while True:
            yield input("> " if in_terminal else "")


def answer(models: Sequence[ChatModel], text: str, write: Write, note: Write) -> None:
    """Continues the conversation with each model. `note` gets what is no part of a completion."""
    for model in models:
        if len(models) > 1:
            write(f"[{model.name}]\n")
        if why := run_in_loop(model.answer(text, write), model.limits.deadline_s):
            note(why)


def converse(models: Sequence[ChatModel], lines: Iterable[str], write: Write, note: Write) -> None:
    """Answers each line. `NEW` begins a new conversation, also after one that fills the context."""
    for number, line in enumerate(lines, 1):
        if line.strip() == NEW:
            for model in models:
                model.begin(number)
        elif line.strip():
            try:
                answer(models, line, write, note)
            except PromptTooLong as error:
                note(f"({error.found}; {NEW} begins a new conversation)")


def read_prompts(file: Path) -> list[Task]:
    """The prompts of a file: the rows of a `.jsonl` file as `tasks.kind: jsonl` reads them, or each line of another
    one that is not empty."""
    if file.suffix == ".jsonl":
        return [*JsonlTasks(JsonlTasks.Config(kind="jsonl", path=str(file)), name="chat", seed=0)]
    lines = filter(str.strip, file.read_text(encoding="utf-8").splitlines())
    if tasks := [Task(str(number), (Message("user", line),), {}, "chat") for number, line in enumerate(lines)]:
        return tasks
    raise DataError(f"prompts from {file}", "no line with text", "write one prompt on each line")


@contextmanager
def opened(
    paths: Sequence[str], steps: Sequence[int], overrides: Sequence[str], system: str | None, **limits: float | None
) -> Generator[list[ChatModel]]:
    """Loads models, and closes their engines at the end. One step is that of all runs; several are those of the models
    in order, or of the only run. Raises ConfigError for another number of steps."""
    paths = [*paths] * max(1, len(steps)) if len(paths) == 1 else [*paths]
    model_steps = [*steps] if len(steps) > 1 else [next(iter(steps), None)] * len(paths)
    if len(model_steps) != len(paths) or (steps and not any(map(_is_run, paths))):
        asked, found = f"--step {' --step '.join(map(str, steps))}", f"the model(s) {', '.join(paths)}"
        raise ConfigError(asked, found, "give one step for all runs, or one for each model")
    models: list[ChatModel] = []
    with TemporaryDirectory() as scratch:
        try:
            for number, (path, step) in enumerate(zip(paths, model_steps, strict=True)):
                config = _config_of(path, overrides, f"{scratch}/{number}")
                models.append(_loaded(path, config, step, system, limits))
            yield models
        finally:
            for model in models:
                run_in_loop(model.engine.close(), model.limits.deadline_s)


def _loaded(
    path: str, config: RunConfig, step: int | None, system: str | None, limits: Mapping[str, float | None]
) -> ChatModel:
    """Loads a model, or the policy of a run (None: of its newest checkpoint; 0: before training). It samples as the
    run's evaluation with one sample for each task, except for `limits`."""
    name, about = path, ""
    if _is_run(path):
        step = max(CheckpointStore(Path(path) / "checkpoints").steps(), default=None) if step is None else step
        name = f"{path} step {step}"
        if step is None:
            do = "train first, or use --step 0 for the model before training"
            raise RunDirError(f"the newest checkpoint of {path}", "it has none", do)
        if system is None:
            system, about = _system_of(config.stage_configs()[-1])
    stage = stage_at(config, step if step is not None and _is_run(path) else 0)
    sampling_limits = {key: value for key, value in limits.items() if value is not None}
    sampling = replace(stage.config.evaluation.sampling.sampling(stage.config.engine.sampling, 1), **sampling_limits)
    with shown(Path(name)):
        engine = build_engine(stage)
    kind = f"temperature {sampling.temperature:g}" if sampling.temperature else "greedy"
    about = f"{name}: {kind}, at most {sampling.max_new_tokens} tokens, context {engine.max_context}{about}"
    model = ChatModel(name, about, engine, stage.renderer, sampling, system, config.run.seed, stage.config.workflow)
    model.begin(0)
    return model


def _is_run(path: str) -> bool:
    return config_file(Path(path)).is_file()


def _config_of(path: str, overrides: Sequence[str], scratch: str) -> RunConfig:
    """The config of a run directory, which may have been moved; or one for a model, whose tasks are not read, and whose
    run directory, `scratch`, gets its chat template if an override sets one."""
    if _is_run(path):
        if changed := [override for override in overrides if override.startswith("model.")]:
            do = f"name the model: {path}/checkpoints/step-N/policy"
            raise ConfigError(f"{changed[0]} of a run", "its checkpoints have their own model and chat template", do)
        file = config_file(Path(path))
        config = load_config(file, overrides, _WITHOUT)
        return config.model_copy(update={"run": config.run.model_copy(update={"dir": path})})
    data: dict[str, Any] = {"run": {"dir": scratch}, "model": {"kind": "hf", "path": path}}
    data["tasks"] = {"train": {"kind": "arithmetic"}}
    for override in overrides:
        data = overlaid(data, parse_override(override))
    config = config_from_mapping(data, without=_WITHOUT)
    if (missing := missing_model_error(Path(getattr(config.model, "path", path)))) is None:
        return config
    found = f"no run there (config.yaml), and no model: {missing.found}"
    raise ConfigError(f"chat with {path}", found, f"name the directory of a run, a .gguf file, or: {missing.do}")


def _system_of(config: RunConfig) -> tuple[str | None, str]:
    """The system message of the first task of a run, and a line that describes it; empty if there is none."""
    taskset = "train" if "train" in config.tasks else next(iter(config.tasks))
    section, system = config.tasks[taskset], getattr(config.workflow, "system", None)
    if isinstance(section, Sources.Config):
        section = section.sources[0]
    if hasattr(section, "limit"):
        section = section.model_copy(update={"limit": 1})  # a large file takes seconds
    try:
        prompt: tuple[Message, ...] = build("tasks", section, name=taskset, seed=config.run.seed)[0].prompt
    except TriviumError as error:
        why = f"{error.asked}: {error.found}"
        return system, f"\nthe run's tasks, which may have a system message, cannot be read ({why})"
    system = next((message.content for message in prompt if message.role == "system"), system)
    text = " ".join((system or "").split())
    return system, f"\nsystem message of the run's tasks (--system replaces it): {text:.200}" if text else ""
