"""Converts rows to tasks: shared by all sources of rows, such as files, datasets and functions.

A row is a mapping from column to value. One column (or a template over several) becomes the prompt. `Task.columns`
holds the other columns for rewards.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import string
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date, time
from functools import cached_property
from itertools import islice, takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from trivium.config import ConfigPath, Plugin
from trivium.foundation.errors import DataError, MissingPackage, Problem, text_of
from trivium.foundation.registry import suggest
from trivium.tasks.conversations import as_json, sides_of
from trivium.tasks.pictures import Reader, image_reader, read_content, read_image, row_images, with_leading
from trivium.text.messages import MORE_KEYS, with_calls, with_parts
from trivium.types import Media, Message, Task, with_system
from trivium.types.recordable import unrecordable

Row = dict[str, Any]
_ROLES = ("system", "developer", "user", "assistant", "tool", "tools")
_MAX_DEPTH = 200
"""How deep the values of a row may be nested: msgpack, in which rollouts are recorded, holds 511 levels."""


def _checked_regex(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    return pattern


def _checked_template(template: str) -> str:
    """Every field of a template must name a column."""
    names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    if not names or any(not re.match(r"[^\W\d]", name) for name in names):
        raise ValueError("a template names columns in braces, like {question}; write other braces twice: {{ }}")
    return template


class RowTasks(ABC):
    """A source whose tasks are rows; `rows` is all that a kind of source adds.

    Everything is read and checked when the source is made. Raises DataError for rows that cannot become tasks (unless
    `on_bad_row` skips them) and for a source without rows.
    """

    class Config(Plugin):
        """How a row becomes a task."""

        prompt: str | None = None
        """Column with the prompt: text, or a list of {role, content}. Unset: `prompt`, unless `template` is set."""
        images: str | None = None
        """Column with the images of the prompt, in the order in which `<image>` marks them in its text (unmarked, they
        precede it): paths, bytes, base64 or data URIs, or what `datasets.Image` gives. Unset: the column `images`, if
        any; an empty name: none."""
        image_root: ConfigPath | None = None
        """Folder that paths of images are relative to, and confined to; unset: the folder of the task file, if any."""
        template: Annotated[str, AfterValidator(_checked_template)] | None = None
        """Text of the user message, with columns in braces: "{question} Answer with a number."; instead of `prompt`."""
        system: str | None = None
        """System message put first, unless the prompt brings its own."""
        answer: str | None = None
        """Column offered to rewards as `answer`. Unset: the column `answer`, else `reward_model.ground_truth`."""
        answer_regex: Annotated[str, AfterValidator(_checked_regex)] | None = None
        """Python regular expression found in the answer column; its first group (or all of it) becomes `answer`."""
        completion: str | None = None
        """Column with an expert's completion (text, or messages that end with it), offered as `completion`.
        Unset: the column `completion`, if any. Naming the prompt's own column splits its last message off."""
        conversations: tuple[str, ...] = ()
        """Columns that hold a conversation of their own instead of a completion of the prompt, for a reward model
        (`[chosen, rejected]`): messages with their images, as parts or in a column `<name>_images`; or only images,
        which are shown with the row's prompt."""
        id: str | None = None
        """Column with the task's id; unset, an id is computed from the row's content."""
        skip: int = Field(default=0, ge=0)
        """Rows left out at the start."""
        limit: int | None = Field(default=None, ge=1)
        """Most rows to use; unset, all."""
        on_bad_row: Literal["refuse", "skip"] = "refuse"
        """What happens to rows that cannot become tasks: damaged JSON, a missing column, half of a surrogate pair, an
        integer above 64 bits, NaN. `refuse` ends the check and the run before it starts; `skip` leaves them out, and
        the plan and a warning count them."""
        max_tokens: int | None = Field(default=None, ge=1)
        """Most tokens of a row: of a prompt to roll out, or of prompt and completion to learn from. Unset: what the
        context (`engine.max_context`) or the model holds."""
        on_overlong: Literal["refuse", "drop", "cut_left", "cut_right"] = "refuse"
        """What happens to longer rows. `refuse` ends the check and the run before it starts (prompts without space in
        the context: if they are more than `workflow.max_failed_fraction`, else they fail); `drop` leaves them out;
        `cut_left` and `cut_right` remove the beginning or the end: of the last user message of a prompt to roll out,
        which then leaves space for `engine.sampling.max_new_tokens` (up to half of the context) unless `max_tokens` is
        set; of the tokens of a row to learn from, whose completion then has no end of turn (`cut_right`). A row of
        which nothing would be left, or whose images would be cut, is dropped. The plan and a warning count them."""

        @model_validator(mode="after")
        def _one_prompt(self) -> Self:
            if self.prompt is not None and self.template is not None:
                raise ValueError("set `prompt` or `template`, not both")
            return self

        @property
        def image_folder(self) -> Path | None:
            """The folder of images that rows refer to by path; None: paths are refused."""
            return None if self.image_root is None else Path(self.image_root)

        @property
        def prompt_column(self) -> str | None:
            """The column of the prompt; None if a template makes it."""
            return None if self.template is not None else self.prompt or "prompt"

    def __init__(self, config: Config, *, name: str, seed: int) -> None:
        """`name` is the name of the taskset. Rows keep their order, so `seed` has no effect."""
        self.config, self.name = config, name
        self.num_duplicates = 0
        """Number of rows with a duplicate id, to which a number was appended."""
        self.bad_rows: list[DataError] = []
        """The errors of bad rows, which `on_bad_row` refuses or skips. `rows` adds those that cannot be read."""
        self.num_dropped = self.num_cut = 0
        """Number of overlong rows that were dropped, and that were cut."""
        self.cuts: tuple[int, bool] | None = None
        """(most tokens, whether the beginning is cut) of rows to learn from, if `on_overlong` cuts them."""
        numbered = list(self._read())
        self._tasks = tuple(task for _, task in numbered)
        self._numbers: Sequence[int] = range(config.skip + 1, config.skip + 1 + len(numbered))
        if self.bad_rows:
            self._numbers = [number for number, _ in numbered]
        if self.bad_rows and config.on_bad_row == "refuse":
            first, more = self.bad_rows[0], len(self.bad_rows) - 1
            do = f"{first.do}; or leave such rows out: tasks.{name}.on_bad_row=skip"
            raise DataError(first.asked, first.found + (f"; further bad rows: {more}" if more else ""), do)
        if not self._tasks:
            skipped = config.skip or len(self.bad_rows)
            raise DataError(
                f"tasks for {name!r} from {self.origin}",
                f"no rows after skipping {skipped}" if skipped else "no rows",
                f"give a source with rows to tasks.{name}",
            )

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> Task:
        return self._tasks[index]

    def number(self, place: int) -> int:
        """The number of the row of a task among all rows of the source, from 1."""
        return self._numbers[place]

    def keep(self, tasks: Mapping[int, Task], *, num_cut: int) -> None:
        """Replaces the tasks by those that are left of them, by place, of which `num_cut` are cut (`on_overlong`)."""
        if not tasks:
            found = f"all {len(self)} rows are overlong"
            raise DataError(f"tasks for {self.name!r} from {self.origin}", found, f"raise tasks.{self.name}.max_tokens")
        self.num_dropped, self.num_cut = len(self) - len(tasks), num_cut
        self._numbers = [self._numbers[place] for place in tasks] if self.num_dropped else self._numbers
        self._tasks = tuple(tasks.values())

    @cached_property
    def digest(self) -> str:
        """The number of tasks and a hash of their content, images included. A continued run must read the same."""
        digest = hashlib.blake2b(digest_size=8)
        for task in self._tasks:
            prompt = [[*m.entry().values(), [item.sha256 for item in m.media]] for m in task.prompt]
            digest.update(json.dumps([task.task_id, prompt, task.columns], sort_keys=True).encode())
        return f"{len(self._tasks)} rows, hash {digest.hexdigest()}"

    @property
    @abstractmethod
    def origin(self) -> str:
        """A readable description of the source of the rows."""

    @abstractmethod
    def rows(self) -> Iterator[tuple[str, Any]]:
        """Yields (location, row) in order."""

    def task_of(self, where: str, row: object) -> Task:
        """The task of a row. Its id may not be unique yet."""
        return task_of_row(where, row, self.config, self.name)

    def _read(self) -> Iterator[tuple[int, Task]]:
        """Yields (number of the row, task). Rows that cannot be read are counted, too."""
        stop = None if self.config.limit is None else self.config.skip + self.config.limit
        ids: set[str] = set()
        unmade = 0  # of `bad_rows`; `rows` has left out the others
        for place, (where, row) in islice(enumerate(self.rows(), 1), self.config.skip, stop):
            try:
                task = self.task_of(where, row)
            except DataError as error:
                self.bad_rows.append(error)
                unmade += 1
                continue
            task_id, number = task.task_id, 1
            while task_id in ids:
                number += 1
                task_id = f"{task.task_id}-{number}"
            self.num_duplicates += number > 1
            ids.add(task_id)
            yield place + len(self.bad_rows) - unmade, task if number == 1 else replace(task, task_id=task_id)


def task_of_row(where: str, row: object, config: RowTasks.Config, taskset: str) -> Task:
    """Converts one row to a task."""
    if not isinstance(row, Mapping):
        raise DataError(f"a row at {where}", f"{type(row).__name__}", "give a mapping from column to value")
    plain, sides = _without_sides(where, row, config)
    plain, messages, images = _without_images(where, plain, config)
    columns: Row = json_value(plain, where)
    if config.prompt is None and "prompt" not in columns and (shared := _shared_beginning(columns)):
        columns["prompt"] = shared
    if sides and config.prompt_column is not None and config.prompt_column not in columns:
        prompt = next(iter(sides.values()))
    else:
        prompt = _prompt(where, columns, config, messages, images)
    columns |= {name: json_value(as_json(side), f"{where}, {name!r}") for name, side in sides.items()}
    task_id = _identity(where, columns, config, prompt)
    added = {**_answer(where, columns, config), **_completion(where, columns, config)}
    if config.prompt_column is not None:
        columns.pop(config.prompt_column, None)
    for name, value in added.items():
        _offer(where, columns, name, value)
    return Task(task_id, prompt, columns, taskset)


def _shared_beginning(columns: Row) -> list[Any]:
    """The messages that both conversations of a pair begin with, which are its prompt where the row has no column for
    it; empty without two conversations."""
    sides = [columns.get(name) for name in ("chosen", "rejected")]
    if not all(isinstance(side, list) and all(isinstance(entry, dict) for entry in side) for side in sides):
        return []
    pairs = zip(*(side[:-1] for side in sides if side), strict=False)
    return [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]


def missing_package(where: str, module: str, error: MissingPackage) -> Iterator[Problem]:
    """Yields a problem of the section `where` if the module is not installed. Does not import it."""
    if importlib.util.find_spec(module) is None:
        yield Problem(where, error.asked, error.found, error.do)


def json_value(value: object, where: str, depth: int = 0) -> Any:
    """Converts a value to JSON values that a run can record: tuples become lists, dates become ISO text. Raises
    DataError for other values."""
    if depth > _MAX_DEPTH:
        asked = f"values nested at most {_MAX_DEPTH} deep at {where:.200}"
        raise DataError(asked, "deeper ones", "write the value as JSON text, or remove the column")
    if value is None or isinstance(value, str | int | float):
        if (problem := unrecordable(value)) is None:
            return value
        raise DataError(f"{problem[0]} at {where}", problem[1], f"{problem[2]}, or remove the column")
    if isinstance(value, Mapping) and all(_is_ascii(key) or _is_name(key) for key in value):
        return {
            key: item if _is_ascii(item) else json_value(item, f"{where}, {key!r}", depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [
            item if _is_ascii(item) else json_value(item, f"{where}[{index}]", depth + 1)
            for index, item in enumerate(value)
        ]
    if isinstance(value, date | time):
        return value.isoformat()
    raise DataError(
        f"a JSON value at {where}",
        f"{type(value).__name__} {text_of(value, 60, repr)}",
        "store it as text, a finite number, a list or a mapping with text keys, or remove the column",
    )


def _is_ascii(value: object) -> bool:
    """Whether a value needs no look: most values of rows and all usual names of columns."""
    return type(value) is str and value.isascii()


def _is_name(key: object) -> bool:
    return isinstance(key, str) and unrecordable(key) is None


def messages_of(
    value: object, where: str, reader: Reader = read_image, images: list[Media] | None = None
) -> tuple[Message, ...]:
    """Converts a prompt column to messages: text is one user message, a list has {role, content} entries, with
    `tool_calls`, `tool_call_id`, `name` and `reasoning_content` as in a request to OpenAI's Chat Completions.

    A content is text or a list of parts, whose images `read` reads. Removes the `images` that the messages mark from
    the list.
    """
    entries: Any = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(entries, list) or not entries:
        raise DataError(f"a prompt at {where}", f"{value!r:.80}", "give text or a list of {role, content} messages")
    messages = [_message(entry, f"{where}, message {index}", reader, images) for index, entry in enumerate(entries)]
    return with_calls(messages, entries)


def _message(entry: object, where: str, reader: Reader, images: list[Media] | None) -> Message:
    """Converts an entry of a conversation, for `messages_of`."""
    message = {key: item for key, item in entry.items() if item is not None} if isinstance(entry, Mapping) else {}
    role = message.get("role")
    allowed = {"role", "content", *MORE_KEYS.get(str(role), ())}
    content = None
    if role in _ROLES and set(message) <= allowed and ("content" in message or "tool_calls" in message):
        content = read_content(message.get("content", ""), where, reader, images)
    if content is None:
        raise DataError(
            f"a message at {where}",
            f"{entry!r:.80}",
            f"give {{role, content}}, the role one of {', '.join(_ROLES)}, the content text, or parts of text and "
            "images; an assistant may have tool_calls and reasoning_content, a tool tool_call_id and name",
        )
    return with_parts(replace(content, role=role), message, where)


def _without_sides(
    where: str, row: Mapping[str, Any], config: RowTasks.Config
) -> tuple[Mapping[str, Any], dict[str, tuple[Message, ...]]]:
    """Returns (the row without its `conversations` and their images, the messages of each conversation)."""
    if not config.conversations:
        return row, {}
    column, reader = config.prompt_column, image_reader(config.image_folder)
    prompt = row.get(column) if column is not None else _filled(where, config.template or "", dict(row))

    def messages_with(value: object, at: str, images: list[Media]) -> tuple[Message, ...]:
        messages = messages_of(list(value) if isinstance(value, tuple) else value, at, reader, images)
        return messages if config.system is None else with_system(messages, config.system)

    sides = sides_of(where, row, config.conversations, reader, messages_with, prompt)
    held = {name for side in sides for name in (side, f"{side}_images")}
    return {name: value for name, value in row.items() if name not in held}, sides


def _without_images(
    where: str, row: Mapping[str, Any], config: RowTasks.Config
) -> tuple[Row, tuple[Message, ...] | None, list[Media] | None]:
    """Returns (the row with hashes of its images, the messages of its prompt if it has images, the remaining images).

    The remaining images are None if the row has no column of images.
    """
    row, images = dict(row), None
    reader, name = image_reader(config.image_folder), "images" if config.images is None else config.images
    if name and (name in row or config.images is not None):
        images = row_images(_column(where, row, name, "the images"), f"{where}, {name!r}", reader)
        if images:
            row[name] = [{"mime": item.mime, "sha256": item.sha256} for item in images]
    prompt = config.prompt_column
    value = None if prompt is None else row.get(prompt)
    entries = value if isinstance(value, list | tuple) else ()
    in_parts = any(isinstance(entry, Mapping) and isinstance(entry.get("content"), list | tuple) for entry in entries)
    if prompt is None or value is None or not (images or in_parts):
        return row, None, images
    messages = messages_of(list(entries) or value, f"{where}, {prompt!r}", reader, images)
    row[prompt] = [message.entry() for message in messages]
    return row, messages, images


def _column(where: str, row: Row, name: str, purpose: str) -> object:
    if name not in row:
        raise DataError(f"column {name!r} at {where}, for {purpose}", "no such column", suggest(name, row))
    return row[name]


def _identity(where: str, row: Row, config: RowTasks.Config, prompt: Sequence[Message]) -> str:
    """The id column, or a hash of the row, which does not depend on the template or on the order of the file."""
    if config.id is None:
        text = json.dumps(row, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        text += "".join(item.sha256 for message in prompt for item in message.media)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    value = _column(where, row, config.id, "the id")
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise DataError(f"an id in column {config.id!r} at {where}", repr(value), "give text or an integer")
    return str(value)


def _prompt(
    where: str,
    row: Row,
    config: RowTasks.Config,
    messages: tuple[Message, ...] | None,
    images: list[Media] | None,
) -> tuple[Message, ...]:
    """The messages of the prompt: `messages`, or those of the row's columns, with the images."""
    column = config.prompt_column
    if column is None:
        messages = messages_of(_filled(where, config.template or "", row), where, images=images)
    elif messages is None:
        messages = messages_of(_column(where, row, column, "the prompt"), f"{where}, {column!r}", images=images)
    if column is not None and column == config.completion:
        messages = messages[:-1]
    if not messages or messages[-1].role == "assistant":
        raise DataError(
            f"a prompt that ends before the assistant's turn, at {where}",
            f"it ends with {messages[-1].role!r}" if messages else "there is no message before the completion",
            f"drop the last message, or set completion: {column} to make it the expert's completion",
        )
    messages = with_leading(messages, images or (), where)
    return messages if config.system is None else with_system(messages, config.system)


def _filled(where: str, template: str, row: Row) -> str:
    try:
        return template.format_map(row)
    except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
        raise DataError(
            f"the template {template!r:.60} filled at {where}",
            f"{type(error).__name__}: {error}",
            f"use columns that every row has: {', '.join(sorted(row))}",
        ) from error


def _answer(where: str, row: Row, config: RowTasks.Config) -> Row:
    """{"answer": ...}, or {} if the row has none and the config names no column."""
    required = config.answer is not None or config.answer_regex is not None
    column = config.answer or "answer"
    reward_model = row.get("reward_model")
    if column in row:
        value = row[column]
    elif config.answer is None and isinstance(reward_model, dict) and "ground_truth" in reward_model:
        value = reward_model["ground_truth"]
    elif required:
        value = _column(where, row, column, "the answer")
    else:
        return {}
    if config.answer_regex is None:
        return {"answer": value}
    match = re.search(config.answer_regex, value) if isinstance(value, str) else None
    if match is None:
        raise DataError(
            f"the answer at {where} by answer_regex {config.answer_regex!r}",
            f"no match in {value!r:.200}",
            "fix the row or the expression",
        )
    return {"answer": match.group(1) if match.re.groups else match.group()}


def _completion(where: str, row: Row, config: RowTasks.Config) -> Row:
    """{"completion": text}, or {} if the row has none and the config names no column."""
    column = config.completion or "completion"
    if config.completion is None and column not in row:
        return {}
    value = _column(where, row, column, "the expert's completion")
    if isinstance(value, str):
        return {"completion": value}
    last = messages_of(value, f"{where}, {column!r}")[-1]
    if last.role != "assistant":
        raise DataError(
            f"an expert's completion in column {column!r} at {where}",
            f"the last message is from {last.role!r}",
            "give text, or messages that end with the assistant's",
        )
    return {"completion": [last.entry()] if last.tool_calls or last.reasoning is not None else last.content}


def _offer(where: str, columns: Row, name: str, value: object) -> None:
    """Sets a column. Keeps a different value of that name as `<name>_column`."""
    if name in columns and columns[name] != value:
        renamed = f"{name}_column"
        if renamed in columns:
            raise DataError(
                f"another name for the column {name!r} at {where}",
                f"{renamed!r} is a column too",
                f"rename {renamed!r}",
            )
        columns[renamed] = columns[name]
    columns[name] = value
