"""How long rows are, in tokens, and what happens to those that are too long (`tasks.*.on_overlong`).

The same rows are dropped and cut in every process of a run, since each reads the config and the tokenizer alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trivium.buffers.files import FileBuffer, is_conversation
from trivium.buffers.row_cuts import cut_turns, excess
from trivium.config import RunConfig
from trivium.config.recording import shape_in
from trivium.foundation.errors import ConfigError, DataError, TriviumError
from trivium.models.backbone.huggingface import HuggingFaceModel
from trivium.models.vision.images import images_of
from trivium.planning.memory_estimate import context_limit
from trivium.protocols import TaskSource
from trivium.schedule import Assignment, Schedule
from trivium.tasks.concatenation import Sources
from trivium.tasks.rows import RowTasks
from trivium.text import hf_tokenizer
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import TinyModel
from trivium.text.tiny_vision import TinyVisionModel
from trivium.types import Message, Task
from trivium.workflows.single_turn import SingleTurn

_MESSAGE_TOKENS = 64
"""Upper bound on the tokens that a chat template adds to a message. A prompt that fits with this many added tokens is
not rendered."""


def is_learned_from(config: RunConfig, taskset: str) -> bool:
    """Whether the rows of a taskset hold the completions that are learned from, or that the held-out loss reads."""
    return isinstance(config.buffer, FileBuffer.Config) and taskset in ("train", config.evaluation.held_out)


def longest_row(config: RunConfig, taskset: str) -> int | None:
    """The most tokens of a row of a taskset: of a whole sequence to learn from, or of a prompt, which leaves space for
    a token. None: no limit is known."""
    shape, limit, max_tokens = (
        shape_in(config),
        context_limit(config),
        getattr(config.tasks[taskset], "max_tokens", None),
    )
    if is_learned_from(config, taskset):
        bounds = (max_tokens, None if shape is None else shape.max_positions)
    else:
        bounds = (max_tokens, None if limit is None else limit - 1)
    return min((bound for bound in bounds if bound is not None), default=None)


def fit(tasks: TaskSource, config: RunConfig, taskset: str) -> None:
    """Drops or cuts the rows that are too long, if the section of the taskset says that."""
    if isinstance(tasks, Sources):
        for _, part, part_config in sources_in(tasks, config, taskset):
            fit(part, part_config, taskset)
    longest = longest_row(config, taskset)
    if not isinstance(tasks, RowTasks) or tasks.config.on_overlong == "refuse" or longest is None:
        return
    renderer = renderer_here(config)
    if renderer is None:
        return
    if is_learned_from(config, taskset):
        fitted = _fitted_rows(tasks, config, renderer, longest)
    else:
        fitted = _fitted_prompts(tasks, config, renderer, longest)
    rows = {place: row for place in range(len(tasks)) if (row := fitted(tasks[place])) is not None}
    tasks.keep(rows, num_cut=sum(row is not tasks[place] for place, row in rows.items()))


def sources_in(tasks: TaskSource, config: RunConfig, taskset: str) -> Iterator[tuple[str, TaskSource, RunConfig]]:
    """Yields (place in the config, source, config with its section alone) of each source of a taskset."""
    where, section = f"tasks.{taskset}", config.tasks[taskset]
    if not (isinstance(tasks, Sources) and isinstance(section, Sources.Config)):
        yield where, tasks, config
        return
    for number, (part, part_section) in enumerate(zip(tasks.parts, section.sources, strict=True)):
        yield f"{where}[{number}]", part, config.model_copy(update={"tasks": {**config.tasks, taskset: part_section}})


def row_number(tasks: TaskSource, place: int) -> int:
    """The number of the row of a task in its file, from 1."""
    return tasks.number(place) if isinstance(tasks, RowTasks) else place + 1


def left_out(tasks: TaskSource) -> Mapping[str, int]:
    """The numbers of rows that a source skipped, dropped or cut, by the reason and the key."""
    if isinstance(tasks, Sources):
        return dict(sum((Counter(left_out(part)) for part in tasks.parts), Counter[str]()))
    if not isinstance(tasks, RowTasks):
        return {}
    counts = {
        "skipped (on_bad_row)": len(tasks.bad_rows),
        "dropped (on_overlong)": tasks.num_dropped,
        "cut (on_overlong)": tasks.num_cut,
    }
    return {what: count for what, count in counts.items() if count}


_Fitted = Callable[[Task], Task | None]
"""The task, a copy of one that is cut, or None for one to drop."""


def _fitted_rows(tasks: RowTasks, config: RunConfig, renderer: ChatRenderer, longest: int) -> _Fitted:
    """For rows to learn from. The buffer cuts their tokens, by `RowTasks.cuts`."""
    schedule = Schedule((), config.run.seed, group_size=config.schedule.group_size)  # pyright: ignore[reportArgumentType]
    assert isinstance(config.buffer, FileBuffer.Config)
    buffer = FileBuffer(config.buffer, schedule=schedule, rollouts=Path(), renderer=renderer, deadline_s=0)
    cuts = None if tasks.config.on_overlong == "drop" else (longest, tasks.config.on_overlong == "cut_left")

    def fitted(task: Task) -> Task | None:
        if surely_within(longest, texts_of(task)) and not has_images(task.prompt):
            return task
        try:
            turns = [turn for expert in buffer.group_of(Assignment(0, task, 0)).trajectories for turn in expert.turns]
        except DataError:
            return task  # the check of the rows reports it
        if not any(excess(turns, longest)):
            return task
        return None if cuts is None or cut_turns(turns, *cuts) is None else replace(task)

    tasks.cuts = cuts
    return fitted


def _fitted_prompts(tasks: RowTasks, config: RunConfig, renderer: ChatRenderer, longest: int) -> _Fitted:
    """For tasks to roll out. Other workflows than a single turn make their prompts from these messages."""
    workflow = SingleTurn(config.workflow) if isinstance(config.workflow, SingleTurn.Config) else None
    how, space = tasks.config.on_overlong, config.engine.sampling.max_new_tokens
    # Space for a whole completion remains, but at most half of the context: a long completion leaves a prompt.
    wanted = longest if tasks.config.max_tokens else longest + 1 - min(space, (longest + 1) // 2)

    def messages(task: Task) -> tuple[Message, ...]:
        return task.prompt if workflow is None else workflow.prompt(task)

    def length(task: Task) -> int:
        return len(renderer.render(messages(task)))

    def fitted(task: Task) -> Task | None:
        if surely_within(longest, messages(task)) and not has_images(task.prompt):
            return task
        try:
            if length(task) <= longest:
                return task
            return None if how == "drop" else _cut_prompt(task, max(1, wanted), length, from_left=how == "cut_left")
        except DataError:
            return task  # the check of the prompts reports it

    return fitted


def _cut_prompt(task: Task, longest: int, length: Callable[[Task], int], *, from_left: bool) -> Task | None:
    """The task without the beginning (`from_left`) or the end of its last user message, whose marks of the template
    stay whole; None if that does not suffice, or if the message has images, whose places are in the text."""
    place = max((n for n, message in enumerate(task.prompt) if message.role == "user"), default=None)
    if place is None or task.prompt[place].media:
        return None
    text = task.prompt[place].content

    def with_characters(number: int) -> Task:
        content = text[len(text) - number :] if from_left else text[:number]
        message = replace(task.prompt[place], content=content)
        return replace(task, prompt=(*task.prompt[:place], message, *task.prompt[place + 1 :]))

    fits, too_many = 0, len(text)
    while fits + 1 < too_many:
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if length(with_characters(middle)) <= longest else (fits, middle)
    return with_characters(fits) if fits else None


def surely_within(longest: int, messages: Iterable[Message]) -> bool:
    """Whether a prompt without images certainly has at most so many tokens: a token stands for at least one byte."""
    texts = (
        message.content if not (message.tool_calls or message.reasoning) else str(message.entry())
        for message in messages
    )
    return sum(len(text.encode(errors="replace")) + _MESSAGE_TOKENS for text in texts) <= longest


def has_images(messages: Iterable[Message]) -> bool:
    return any(message.media for message in messages)


def texts_of(task: Task) -> list[Message]:
    """Returns a task's prompt and all texts that may be its completion, as messages."""
    texts = [
        entry["content"]
        for value in task.columns.values()
        for entry in (value["conversation"] if is_conversation(value) else [{"content": str(value)}])
    ]
    return [*task.prompt, *(Message("assistant", text) for text in texts)]


def tokenizer_in(directory: Path) -> Any:
    """Returns the tokenizer of a model directory."""
    return hf_tokenizer(directory, correct_pad_token=False)  # packs need no padding


def renderer_here(config: RunConfig) -> ChatRenderer | None:
    """Returns the renderer of the model, without loading the model; None for a user's own kind of model."""
    model, max_pixels = config.model, config.workflow.max_image_pixels
    if isinstance(model, TinyVisionModel.Config):
        return ChatRenderer(model.tokenizer(), images=TinyVisionModel.images(model, max_pixels))
    if isinstance(model, TinyModel.Config):
        return ChatRenderer(model.tokenizer())
    if not isinstance(model, HuggingFaceModel.Config):
        return None
    try:
        tokenizer = tokenizer_in(Path(model.path))
    except (ValueError, KeyError, TypeError, ImportError) as error:  # transformers raises this for damaged files
        if isinstance(error, TriviumError):
            raise
        raise ConfigError(
            f"the tokenizer in {model.path}",
            f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
            "save the model's tokenizer there (tokenizer.save_pretrained)",
        ) from error
    images = images_of(model.path, max_pixels=max_pixels)
    return ChatRenderer(
        tokenizer,
        chat_template=model.template(),
        images=images,
        tool_calls=model.tool_calls,
        roles=model.roles,
        today=config.run.date,
    )
