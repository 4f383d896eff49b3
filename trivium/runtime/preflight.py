"""Checks a config before a run without starting it: files, rows, rewards, devices, packages.

`trivium check` prints the problems. `trivium run` refuses to start with the same problems and logs the same warnings.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, TypeVar, cast

from trivium.buffers.files import FileBuffer
from trivium.config import ModelConfig, RunConfig
from trivium.config.checks import sections_of
from trivium.config.recording import shape_in
from trivium.config.rules import Rules
from trivium.config.schema import Config
from trivium.foundation.concurrency import usable_cores
from trivium.foundation.errors import Caution, ConfigError, DataError, MissingPackage, Problem, TriviumError
from trivium.foundation.registry import resolve
from trivium.models.backbone.huggingface import HuggingFaceModel
from trivium.models.vision.images import check_image, decoded
from trivium.models.vision.processor import read_json
from trivium.planning.machine import Machine
from trivium.planning.memory_estimate import PROMPT_TOKENS, Lengths, TaskTokens, context_limit, gpus_of, planned
from trivium.planning.parallel import mesh_problems
from trivium.protocols import TaskSource
from trivium.rewards.judge import Judge, make_judge
from trivium.rewards.model import ModelReward
from trivium.rewards.recipe import changed, parts_of
from trivium.rewards.trial import is_plain, trial
from trivium.runtime.build import build_schedule, build_tasks, digest_of, shares_buffer, tasks_of
from trivium.runtime.row_lengths import (
    is_learned_from,
    left_out,
    longest_row,
    renderer_here,
    row_number,
    sources_in,
    surely_within,
    texts_of,
    tokenizer_in,
)
from trivium.runtime.stage import Stage
from trivium.runtime.stage_models import stage_problems
from trivium.runtime.train_engines import check_vocabulary
from trivium.schedule import Schedule
from trivium.serving.serve import read_key
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import TinyModel
from trivium.text.tool_formats import detected, rendered_by
from trivium.types import SERVED, Message, Task, Trajectory, capabilities_of
from trivium.workflows.episodes import EpisodeConfig
from trivium.workflows.function_schemas import described_function, function_of
from trivium.workflows.function_tools import FunctionTools
from trivium.workflows.single_turn import SingleTurn
from trivium.workflows.tools import COLUMN, ToolConfig, chosen
from trivium.workflows.verifiers import Verifiers

T = TypeVar("T")

_MADE_TASKS = 1000
"""Number of tasks to check of a source that generates them on access. All tasks of a source with rows are checked."""
_MEASURED = 64
"""Number of tasks whose tokens are counted because their texts are the longest, and as many again that are evenly
spaced. A prompt takes about a millisecond."""
_FIRST_ROWS = 64
"""Number of expert completions to check in full, beside those whose tokens are counted or that may be too long."""
_FIRST_IMAGES = 256
"""Number of prompts with images to render; of further ones, only the images are decoded."""
_DECODING_S = 20.0
"""Seconds for decoding images. Of the remaining images, only the headers and checksums are checked."""
_LEAST_RANDOM_LR = 1e-5
"""Below this learning rate, the check warns about a model with random weights."""
_MONITORS = {
    "tensorboard": ("tensorboard", "tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow-skinny", "mlflow"),
}
"""Kind of monitor -> (module, package, extra of Trivium)."""


@dataclass
class Findings:
    """The result of the checks before a run."""

    problems: list[Problem] = field(default_factory=list[Problem])
    """The problems that prevent the run on this machine."""
    warnings: list[Problem] = field(default_factory=list[Problem])
    rows: dict[str, str] = field(default_factory=dict[str, str])
    """The `RowTasks.digest` of each task source with rows, by its place in the config."""
    tasks: list[TaskTokens] = field(default_factory=list[TaskTokens])
    """What each stage reads: the plan depends on it."""

    def refuse(self) -> None:
        """Raises ConfigError with all problems, if there are any."""
        if self.problems:
            found = f"{len(self.problems)} problem(s)"
            raise ConfigError("a config that can run here", found, "fix them all at once:", self.problems)


@dataclass
class _TokenCounts:
    """The numbers of tokens that the checks of a stage counted."""

    prompts: list[int] = field(default_factory=list[int])
    rows: list[int] = field(default_factory=list[int])
    num_tasks: int = 0
    """Tasks that are rolled out."""
    num_rows: int = 0
    evaluated: int = 0
    unread: str = ""
    """Why the lengths of some prompts are unknown."""
    left_out: dict[str, int] = field(default_factory=dict[str, int])
    """The rows that are skipped, dropped or cut, by taskset and reason."""

    def tokens(self) -> TaskTokens:
        """For the plan. Prompts of unknown length are assumed to be at least as long as the others."""
        assumed = PROMPT_TOKENS if self.unread or not self.prompts else 0
        prompts = Lengths(
            max([assumed, *self.prompts]),
            assumed or int(median(self.prompts)),
            f"assumed: {self.unread or 'no prompt was read'}"
            if assumed
            else f"{len(self.prompts)} of {self.num_tasks} prompts",
        )
        rows = f"{len(self.rows)} of {self.num_rows} sequences"
        lengths = Lengths(max(self.rows), int(median(self.rows)), rows) if self.rows else None
        return TaskTokens(prompts, lengths, self.evaluated, self.left_out)


@dataclass(frozen=True)
class _StageHere:
    """One stage on this machine."""

    config: RunConfig
    number: int
    machine: Machine
    ranks: int
    """Training ranks on this machine."""
    all_ranks: int
    """Training ranks of the run."""
    sources: dict[str, TaskSource | None]
    """The task sources read for this or an earlier stage; None for an unreadable one."""
    digests: dict[str, str] = field(default_factory=dict[str, str])
    """See `Findings.rows`; filled in while the tasks are checked."""
    counts: _TokenCounts = field(default_factory=_TokenCounts)
    """Filled in likewise."""

    @cached_property
    def renderer(self) -> ChatRenderer | None:
        return renderer_here(self.config)


@dataclass(frozen=True)
class _Taskset:
    """The tasks of one name in a stage's config."""

    config: RunConfig
    name: str
    tasks: TaskSource
    judge: Judge | None
    """None if no explorer rolls the tasks out, or if the rewards cannot be built."""
    renderer: ChatRenderer | None
    counts: _TokenCounts
    where: str
    """The place of their section in the config."""

    @property
    def places(self) -> range:
        """The indices of the tasks to check."""
        return range(len(self.tasks) if digest_of(self.tasks) else min(len(self.tasks), _MADE_TASKS))

    @cached_property
    def checked(self) -> TaskSource | list[Task]:
        """The tasks at these places. Those that are made are made once for all rules: a picture takes a millisecond.
        Those of files are read again, since all together may not fit into memory."""
        return self.tasks if digest_of(self.tasks) else [self.tasks[place] for place in self.places]

    def row(self, place: int) -> int:
        """The number of the row of a task in its file, from 1."""
        return row_number(self.tasks, place)

    def report(
        self, asked: str, failing: Sequence[str], do: str, *, warns: bool = False, allowed: float | None = None
    ) -> Iterator[Problem]:
        """Counts the failing tasks and describes the first. Failing tasks are a problem if they exceed the fraction
        `allowed` (None: `workflow.max_failed_fraction`), else a warning. With `warns` (a probable mistake), they are
        always a warning."""
        if failing:
            total = len(self.places)
            allowed = self.config.workflow.max_failed_fraction if allowed is None else allowed
            may_fail = len(failing) < total and len(failing) <= allowed * total
            found = f"{len(failing)} of {total} {'have others' if warns else 'do not'}: {failing[0]}"
            kind = Caution if warns or may_fail else Problem
            yield kind(self.where, asked, found, do)


STAGE_RULES = Rules[_StageHere]()
TASKSET_RULES = Rules[_Taskset]()


def preflight(config: RunConfig, here: Machine, ranks: int, all_ranks: int = 0) -> Findings:
    """Checks the files, rows and devices that the stages of a config use on this machine, on which `ranks` of
    `all_ranks` ranks train (0: all are here)."""
    problems, rows = [*_unwritable(Path(config.run.dir)), *stage_problems(config)], dict[str, str]()
    tasks = list[TaskTokens]()
    sources: dict[str, TaskSource | None] = {}
    for number, stage_config in enumerate(config.stage_configs()):
        stage = _StageHere(stage_config, number, here, ranks, all_ranks or ranks, sources)
        of_stage = STAGE_RULES.problems(stage)
        # These need the tasks and the renderer, which the rules have reported if they are broken.
        if all(isinstance(problem, Caution) for problem in of_stage):
            of_stage += _order_problems(stage)
        tasks.append(stage.counts.tokens())
        prefix = f"stages[{number}]." if config.stages else ""
        rows |= {prefix + where: digest for where, digest in stage.digests.items()}
        reported = {problem[1:] for problem in problems}  # an earlier stage has reported them
        problems += [
            problem._replace(where=prefix + problem.where) for problem in of_stage if problem[1:] not in reported
        ]
    return Findings(
        problems=[problem for problem in problems if not isinstance(problem, Caution)],
        warnings=[problem for problem in problems if isinstance(problem, Caution)],
        rows=rows,
        tasks=tasks,
    )


def attempt(where: str, make: Callable[[], T]) -> Generator[Problem, None, T | None]:
    """Returns the result of `make` to `yield from`; if `make` fails, yields the problem and returns None."""
    try:
        return make()
    except TriviumError as error:
        yield Problem(where, error.asked, error.found, error.do)
    except OSError as error:
        yield Problem(where, "read what it names", f"{type(error).__name__}: {error}", "correct it")
    return None


def _explores_here(config: RunConfig) -> bool:
    """Whether this process has a rollout engine."""
    return config.run.mode != "train"


def _trains_here(config: RunConfig) -> bool:
    """Whether this process trains. A server with a shared buffer leaves training to another process."""
    return config.run.mode != "explore" and not (config.run.mode == "serve" and shares_buffer(config.buffers))


def _is_rolled_out(config: RunConfig, taskset: str) -> bool:
    """Whether an explorer rolls the taskset out, so that rewards judge it."""
    explored = capabilities_of(resolve("buffers", config.buffer.kind)).explored
    return taskset == config.evaluation.taskset or (taskset == "train" and explored)


# --------------------------------------------------------------------------- the machine


def _unwritable(run_dir: Path) -> Iterator[Problem]:
    """Reports a run directory that cannot be created or written to; leaves no files behind."""
    try:
        above = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.exists())
        tempfile.TemporaryDirectory(dir=above).cleanup()
    except OSError as error:
        found = f"{type(error).__name__}: {error.strerror}"
        yield Problem("run.dir", f"write to {run_dir}", found, "choose a directory that can be written")


@STAGE_RULES.rule
def devices(stage: _StageHere) -> Iterator[Problem]:
    """This machine lacks GPUs. A running Ray cluster, the trainer of a separate explorer and the explorers of a
    separate trainer may be on other machines."""
    config, ranks, gpus = stage.config, stage.ranks, len(stage.machine.gpus)
    cluster = config.cluster
    if cluster.address is not None:
        return
    engines = cluster.explorers * cluster.engines * gpus_of(config.engine)
    engine = getattr(config.engine, "device", "cpu") if _explores_here(config) else "cpu"
    train = getattr(config.train, "device", "cpu") if _trains_here(config) else "cpu"
    if engine == "cuda" and train != "cpu" and cluster.kind == "ray" and max(engines, ranks) <= gpus < engines + ranks:
        found, do = f"there are {gpus}", "lower cluster.engines or cluster.ranks, or set engine.device to auto"
        yield Problem("cluster.engines", f"{engines + ranks} GPUs for engines and ranks", found, do)
    elif engine != "cpu" and gpus and gpus_of(config.engine) > gpus:
        found, do = f"there are {gpus}", "lower engine.tensor_parallel_size"
        yield Problem("engine.tensor_parallel_size", f"an engine over {gpus_of(config.engine)} GPUs", found, do)
    for where, device, wanted in (("engine", engine, engines), ("train", train, ranks)):
        if where == "engine" and device == "auto":
            continue  # the engine samples on the CPU if there are too few
        if device.startswith("cuda") and not gpus:
            yield Problem(f"{where}.device", device, "torch finds no GPU here", f"set {where}.device to cpu")
        elif device != "cpu" and gpus and wanted > gpus and (where == "train" or cluster.kind == "ray"):
            key = "cluster.ranks" if where == "train" else "cluster.engines"
            yield Problem(key, f"{wanted} GPUs", f"there are {gpus}", "lower it, or use the CPU")


@STAGE_RULES.rule
def split_ranks(stage: _StageHere) -> Iterator[Problem]:
    """The numbers of ranks that the section `train` names do not divide the ranks of the run."""
    train, ranks = cast(Any, stage.config.train), stage.all_ranks
    if _trains_here(stage.config) and hasattr(train, "parallel") and (ranks > 1 or train.parallel.is_set):
        sizes = {"sequence": train.sequence_parallel, "shard": train.shard}
        yield from mesh_problems(ranks, **sizes, tensor=train.parallel.tensor, expert=train.parallel.expert)


@STAGE_RULES.rule
def slow_devices(stage: _StageHere) -> Iterator[Problem]:
    """Engines sample on the CPU while training uses GPUs, or a variable that sets threads has no effect."""
    config, here, asked_for = stage.config, stage.machine, os.environ.get("OMP_NUM_THREADS", "")
    threads = config.cluster.threads or usable_cores()
    if config.cluster.kind == "local" and stage.ranks == 1 and asked_for not in ("", str(threads)):
        found = f"OMP_NUM_THREADS is {asked_for}, which has no effect: cluster.threads sets the number"
        do = f"set cluster.threads: {asked_for} for that"
        yield Caution("cluster.threads", f"up to {threads} threads", found, do)
    engine, train = getattr(config.engine, "device", None), str(getattr(config.train, "device", "cpu"))
    trains_on_gpu = planned(train, "auto", here)[0] == "cuda"
    if engine == "cpu" and trains_on_gpu:
        asked, found = "an engine on the CPU beside a trainer on a GPU", f"train.device is {train}"
        yield Caution("engine.device", asked, found, "set it to auto, or to cuda")
    per_engine = gpus_of(config.engine)
    if (
        config.cluster.kind == "local"
        and _explores_here(config)
        and stage.ranks > per_engine
        and (idle := stage.ranks % per_engine)
    ):
        found = f"{stage.ranks} ranks on this machine: the GPUs of {idle} of them sample nothing"
        yield Caution("engine.tensor_parallel_size", f"engines over {per_engine} GPUs", found, "choose a divisor")
    cluster, gpus = config.cluster, len(here.gpus)
    wanted = cluster.explorers * cluster.engines * gpus_of(config.engine) + cluster.ranks * trains_on_gpu
    if engine == "auto" and cluster.kind == "ray" and cluster.address is None and 0 < gpus < wanted:
        found = f"{gpus}, and engines and training ranks take {wanted}: the engines sample on the CPU"
        do = "lower cluster.engines or cluster.ranks; with cluster.kind local both share one GPU"
        yield Caution("engine.device", "a GPU for each engine", found, do)


@STAGE_RULES.rule
def packages(stage: _StageHere) -> Iterator[Problem]:
    """An optional package that the config needs is not installed. Packages are looked up, not imported."""
    config = stage.config
    needed = [(f"monitors[{n}]", *_MONITORS[m.kind]) for n, m in enumerate(config.monitors) if m.kind in _MONITORS]
    if config.cluster.kind == "ray":
        needed.append(("cluster.kind", "ray", "ray", "ray"))
    if config.run.mode in ("serve", "tinker"):
        needed.append(("run.mode", "fastapi", "fastapi", "serve"))
    if config.run.mode == "tinker" or getattr(config.train, "lora", None) is not None:
        needed.append(("train.lora", "peft", "peft", "peft"))
    for where, module, package, extra in needed:
        if importlib.util.find_spec(module) is None:
            error = MissingPackage(package, extra, f"the device of {where}")
            yield Problem(where, error.asked, error.found, error.do)


@STAGE_RULES.rule
def settings(stage: _StageHere) -> Iterator[Problem]:
    """A section, or an object that it names, cannot be used on this machine or causes a warning."""
    config = stage.config
    if config.run.mode in ("serve", "tinker"):
        yield from attempt("serve.key_variable", lambda: read_key(config.serve.key_variable))
    for where, section in sections_of(config):
        yield from _settings_of(config, where, section)


def _settings_of(config: RunConfig, where: str, section: Config) -> Iterator[Problem]:
    """Problems and warnings of a section of the config of a stage."""
    yield from section.machine_problems(config, where)
    yield from (Caution(*problem) for problem in section.warnings(config, where))
    teacher = getattr(section, "teacher", None)
    if teacher is not None and teacher.path is not None and isinstance(config.model, HuggingFaceModel.Config):
        paths = Path(teacher.path), Path(config.model.path)
        yield from attempt(f"{where}.teacher", lambda: check_vocabulary(*paths, load=tokenizer_in))


@STAGE_RULES.rule
def values(stage: _StageHere) -> Iterator[Problem]:
    """A value is valid but rarely intended."""
    config, limit = stage.config, context_limit(stage.config)
    lr = getattr(getattr(config.train, "optimizer", None), "lr", None)
    is_random = isinstance(config.model, ModelConfig) and config.model.has_random_weights
    if stage.number == 0 and is_random and lr and lr < _LEAST_RANDOM_LR:
        asked, do = "a learning rate for a model with random weights", "set train.optimizer.lr to about 1e-3"
        found = f"{lr:g}, a rate for fine-tuning"
        yield Caution("train.optimizer.lr", asked, found, do)
    sampling = getattr(config.engine, "sampling", None)
    wanted = sampling.max_new_tokens if sampling and "max_new_tokens" in sampling.model_fields_set else 0
    if limit is not None and wanted >= limit and _is_rolled_out(config, "train"):
        asked, found = f"completions of {wanted} tokens", f"the context has {limit} tokens, prompts included"
        do = "lower it, or raise engine.max_context: completions end at the end of the context"
        yield Caution("engine.sampling.max_new_tokens", asked, found, do)


# --------------------------------------------------------------------------- tasks


@STAGE_RULES.rule
def tasks(stage: _StageHere) -> Iterator[Problem]:
    """Model, rewards or tasks cannot be read, or do not fit each other. Checks that depend on a broken part are
    skipped."""
    renderer = yield from attempt("model", lambda: stage.renderer)
    if renderer is not None:
        yield from _beyond_embedding(stage.config, renderer)
        yield from _unread_calls(stage.config, renderer)
    yield from _task_problems(stage, renderer)


def _beyond_embedding(config: RunConfig, renderer: ChatRenderer) -> Iterator[Problem]:
    """Reports tokens that the model lacks. It may have more than the tokenizer: embeddings are often padded."""
    shape, model = shape_in(config), config.model
    if shape is None or not isinstance(model, HuggingFaceModel.Config):
        return
    size, pad = shape.vocabulary, read_json(Path(model.path) / "config.json").get("pad_token_id") or 0
    beyond = [name for name, number in {**renderer.vocabulary, "pad_token_id": pad}.items() if number >= size]
    if beyond:
        kind = Problem if max(pad, *renderer.eos_token_ids) >= size else Caution  # no harm if no text has the token
        found = f"its embedding has {size}, and lacks {len(beyond)}, such as {beyond[0]!r}"
        do = "save the tokenizer that belongs to the model, or enlarge the embedding (resize_token_embeddings)"
        yield kind("model", f"a model with all tokens of the tokenizer in {model.path}", found, do)


def _unread_calls(config: RunConfig, renderer: ChatRenderer) -> Iterator[Problem]:
    """Reports a chat template whose notation of calls no format reads, or another one than `model.tool_calls` names."""
    model, offers = config.model, isinstance(config.workflow, ToolConfig)
    may_offer = config.run.mode == "serve" or isinstance(config.workflow, Verifiers.Config)
    if not isinstance(model, HuggingFaceModel.Config) or not (offers or may_offer):
        return
    if model.tool_calls == "auto":
        problems = attempt("model.tool_calls", renderer.tool_format.check)
        yield from problems if offers else (Caution(*problem) for problem in problems)
        return
    notation = detected(rendered_by(tokenizer_in(Path(model.path)), model.template()))
    if notation.written and notation.format is not resolve("tool_calls", model.tool_calls):
        found = f"the chat template writes {notation.written!r:.200}"
        do = "leave it out, unless the model was trained on another notation than that of its template"
        yield Caution("model.tool_calls", f"calls as {model.tool_calls} writes them", found, do)


def _task_problems(stage: _StageHere, renderer: ChatRenderer | None) -> Iterator[Problem]:
    """Problems of the tasks of a stage."""
    config = stage.config
    # With workers, only the signature of a class is read. Neither a reward model nor a reward that runs on another
    # machine is built here: this machine may lack what it needs (a GPU, a service).
    elsewhere = config.cluster.kind == "ray" or not _explores_here(config)
    rewards = changed(
        config.rewards,
        lambda r: r.model_copy(update={"workers": 1}) if elsewhere or isinstance(r, ModelReward.Config) else r,
    )
    judge = yield from attempt("rewards", lambda: make_judge(rewards, config.workflow.deadline_s))
    for name, section in config.tasks.items():
        key = _source_key(config, name)
        if section.kind != SERVED and key not in stage.sources:
            stage.sources[key] = yield from attempt(f"tasks.{name}", lambda name=name: build_tasks(config, name))
        source = stage.sources.get(key)
        if source is None:
            continue
        if name == config.evaluation.taskset:
            stage.counts.evaluated = len(source) * config.evaluation.samples
        judges = judge if _is_rolled_out(config, name) else None
        for where, part, part_config in sources_in(source, config, name):
            yield from _row_counts(stage, where, part)
            yield from TASKSET_RULES.problems(_Taskset(part_config, name, part, judges, renderer, stage.counts, where))


def _source_key(config: RunConfig, name: str) -> str:
    """What the tasks of a taskset depend on: its section, and what decides which of its rows are too long in the stage,
    and what is left of those that are cut."""
    sections = (config.tasks[name], config.workflow, config.engine)
    return f"{name} {is_learned_from(config, name)} {[section.model_dump_json() for section in sections]}"


def _row_counts(stage: _StageHere, where: str, source: TaskSource) -> Iterator[Problem]:
    """Notes the hash of the rows of a source, and reports those that it leaves out."""
    if digest := digest_of(source):
        stage.digests[where] = digest
    for what, count in left_out(source).items():
        stage.counts.left_out[f"{where}: {what}"] = count
        first = "".join(f"; first {row.asked}" for row in getattr(source, "bad_rows", [])[:1] if "bad" in what)
        do = "set the key to `refuse` for an error instead"
        yield Caution(where, "all rows, whole", f"{count} rows are {what}{first}", do)


@TASKSET_RULES.rule
def columns(taskset: _Taskset) -> Iterator[Problem]:
    """Tasks lack columns that the rewards read, have unused ones, or repeat the ids of earlier tasks."""
    config, judge = taskset.config, taskset.judge
    if judge is not None:
        rows = {taskset.row(place): taskset.checked[place].columns for place in taskset.places}
        lacking = [text for row in rows.values() if (text := judge.lacking(row))]
        do = "map a column to this name in the task source, or give the reward's parameter a default"
        yield from taskset.report("tasks with the columns that the rewards read", lacking, do)
        fit = {number: judge.unfit(row) for number, row in rows.items() if not judge.lacking(row)}
        unfit = [f"row {number}: {text}" for number, text in fit.items() if text]
        do = "write answers as the reward reads them (docs/extend-rewards.md), and leave out rows without one"
        yield from taskset.report("columns that the rewards can compare", unfit, do)
        misfits = [text for row in rows.values() if (text := judge.misfits(row))]
        do = "write the column as text, or convert it in the reward"
        yield from taskset.report("columns of the types that the rewards take", misfits, do, warns=True)
        if isinstance(config.workflow, SingleTurn.Config) and not judge.reads("tools"):
            with_tools = sum(bool(row.get("tools")) for row in rows.values())
            unused = ["a column `tools`, which neither the workflow nor a reward reads"] * with_tools
            do = "describe the tools in the prompt, or use a workflow that offers them"
            yield from taskset.report("columns that are used", unused, do, warns=True)
    if column := getattr(config.tasks[taskset.name], "id", None):
        same = [f"an id of column {column!r} that occurred before"] * getattr(taskset.tasks, "num_duplicates", 0)
        do = "make the ids unique: a number is added to the later ones"
        yield from taskset.report("rows with unique ids", same, do, warns=True)


@TASKSET_RULES.rule
def reward_results(taskset: _Taskset) -> Iterator[Problem]:
    """A reward function gives no number. It is called with one task, or with three while it gives none."""
    config, judge, tasks = taskset.config, taskset.judge, taskset.checked
    others = taskset.name != "train" and _is_rolled_out(config, "train")  # that one's tasks are tried
    if judge is None or others or config.cluster.kind == "ray" or not _explores_here(config):
        return
    judged = [place for place in taskset.places if not judge.lacking(tasks[place].columns)]
    for part in parts_of(config.rewards):
        places = [place for place in judged if part.weight(tasks[place].columns) is not None]
        if not places or not is_plain(part.reward):
            continue
        chosen_ones = sorted({places[0], places[len(places) // 2], places[-1]})
        if failed := trial(part.reward, [tasks[place] for place in chosen_ones], config.schedule.group_size):
            error, always = failed
            kind = Problem if always and config.workflow.max_failed_fraction < 1 else Caution
            yield kind("rewards", error.asked, error.found, error.do)


@TASKSET_RULES.rule
def tool_names(taskset: _Taskset) -> Iterator[Problem]:
    """Tasks choose tools that the workflow does not have."""
    workflow = taskset.config.workflow
    if not isinstance(workflow, FunctionTools.Config) or not _is_rolled_out(taskset.config, taskset.name):
        return
    tools, unknown = [described_function(function_of(path)) for path in workflow.tools], list[str]()
    for task in (taskset.checked[place] for place in taskset.places):
        try:
            chosen(tools, task)
        except DataError as error:
            unknown.append(error.found)
    do = f"give the column {COLUMN!r} a list of names: {', '.join(tool.name for tool in tools)}"
    yield from taskset.report("tasks that choose tools of the workflow", unknown, do)


@TASKSET_RULES.rule
def turns(taskset: _Taskset) -> Iterator[Problem]:
    """The chat template drops or refuses what the workflow answers to a completion."""
    workflow, renderer = taskset.config.workflow, taskset.renderer
    if renderer is None or not _is_rolled_out(taskset.config, taskset.name) or not isinstance(workflow, EpisodeConfig):
        return
    role = "tool" if isinstance(workflow, ToolConfig) else "user"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the characters of its texts, which are no prompt's
            renderer.check_turn(role)
    except DataError as error:
        found = f"{error.found} (in a conversation with a second turn of the role {role})"
        kind = Problem if role == "tool" else Caution  # an environment may end with the first completion
        yield kind("model", f"a chat template for workflow.kind {workflow.kind!r}", found, error.do)


@TASKSET_RULES.rule
def prompts(taskset: _Taskset) -> Iterator[Problem]:
    """Prompts cannot be rendered, leave no space for a completion, or have characters without a token."""
    config, renderer = taskset.config, taskset.renderer
    if renderer is None:
        return
    if not isinstance(config.workflow, SingleTurn.Config) or not _is_rolled_out(config, taskset.name):
        if _is_rolled_out(config, taskset.name):
            taskset.counts.unread = f"workflow {config.workflow.kind!r} makes its prompts itself"
        yield from _image_problems(taskset)
        return
    limit, longest, workflow = context_limit(config), longest_row(config, taskset.name), SingleTurn(config.workflow)
    counted = _counted([workflow.prompt(taskset.checked[place]) for place in taskset.places])
    taskset.counts.num_tasks += len(taskset.tasks)
    small_alphabet = isinstance(config.model, TinyModel.Config)
    too_long, unreadable, refused, pictured = list[str](), list[str](), list[str](), 0
    fitting, forms = list[int](), set[tuple[str, ...]]()
    for place in taskset.places:
        task = taskset.checked[place]
        messages = workflow.prompt(task)
        has_images = any(message.media for message in messages)
        pictured += has_images
        # A small alphabet may lack characters of a short text: such prompts are all rendered.
        short = place not in counted and (longest is None or (surely_within(longest, messages) and not small_alphabet))
        short = short and not _is_empty(task)  # the template may make no token of it
        form = tuple(message.role for message in messages)  # of which the template may drop or refuse one
        short = short and form in forms
        forms.add(form)
        if pictured > _FIRST_IMAGES if has_images else short:  # not rendered
            continue
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                length = len(renderer.render(messages))
            except DataError as error:
                refused.append(f"task {task.task_id!r} (row {taskset.row(place)}): {error.found}")
                continue
        taskset.counts.prompts += [length] * (place in counted)
        if longest is not None and length > longest:
            too_long.append(f"task {task.task_id!r} has {length} tokens, and {_holder('the context', limit, longest)}")
        else:
            fitting.append(length)
        if caught:
            unreadable.append(f"task {task.task_id!r}: {messages[-1].content!r:.60}")
    do = "give them the roles that the model was trained on, and whole images"
    yield from taskset.report("prompts that can be rendered", refused, do)
    if pictured > _FIRST_IMAGES:
        yield from _image_problems(taskset)
    do = f"set tasks.{taskset.name}.on_overlong to drop or cut them, or raise engine.max_context"
    max_tokens = getattr(config.tasks[taskset.name], "max_tokens", None)
    asked = "prompts that leave space for a completion"
    yield from taskset.report(asked, too_long, do, allowed=None if max_tokens is None else 0.0)
    do = "add them to model.alphabet, or set it to bytes: the policy cannot read them"
    yield from taskset.report("prompts with characters that the model knows", unreadable, do, warns=True)
    yield from _short_completions(taskset, limit, fitting)


@TASKSET_RULES.rule
def empty_prompts(taskset: _Taskset) -> Iterator[Problem]:
    """Prompts have no text. A workflow may make its prompts itself, and expert texts may all be without one."""
    empty = [place for place in taskset.places if _is_empty(taskset.checked[place])]
    meant = len(empty) == len(taskset.places) and not _is_rolled_out(taskset.config, taskset.name)
    if isinstance(taskset.config.workflow, SingleTurn.Config) and not meant:
        rows = [f"the prompt of row {taskset.row(place)} is empty" for place in empty]
        yield from taskset.report("prompts with text", rows, "give the rows a prompt, or drop them", warns=True)


def _is_empty(task: Task) -> bool:
    return not any(message.content.strip() or message.media for message in task.prompt if message.role != "system")


def _short_completions(taskset: _Taskset, limit: int | None, lengths: Sequence[int]) -> Iterator[Problem]:
    """The context leaves fewer tokens than the config asks for, after prompts of these lengths."""
    config, sampling = taskset.config, taskset.config.engine.sampling
    eval_tokens = (
        config.evaluation.sampling.max_new_tokens if taskset.name == config.evaluation.taskset != "train" else None
    )
    is_set = eval_tokens or "max_new_tokens" in sampling.model_fields_set or getattr(config.engine, "max_context", None)
    wanted = eval_tokens or sampling.max_new_tokens
    if limit and is_set and wanted < limit and (cut := sum(length + wanted > limit for length in lengths)):
        found = f"the context of {limit} tokens leaves fewer after {cut} of {len(lengths)} prompts that were read: "
        found += f"{limit - max(lengths)} after the longest, of {max(lengths)} tokens"
        do = "lower it, shorten prompts, or raise engine.max_context: completions end at the end of the context"
        key = f"{'evaluation' if eval_tokens else 'engine'}.sampling.max_new_tokens"
        yield Caution(key, f"completions of {wanted} tokens", found, do)


def _image_problems(taskset: _Taskset) -> Iterator[Problem]:
    """Counts the tasks with images that are damaged or too large."""
    failing, skipped, end = list[str](), 0, time.monotonic() + _DECODING_S
    for task in (taskset.checked[place] for place in taskset.places):
        look = decoded if time.monotonic() < end else check_image
        skipped += look is check_image and any(message.media for message in task.prompt)
        try:
            for item in (item for message in task.prompt for item in message.media):
                look(item, taskset.config.workflow.max_image_pixels)
        except DataError as error:
            failing.append(f"task {task.task_id!r}: {error.found}")
    yield from taskset.report("tasks with images that can be read", failing, "give whole images")
    if skipped:
        found = f"{skipped} tasks have images of which only headers and checksums were checked in {_DECODING_S:.0f} s"
        do = "nothing: a rollout fails if its image cannot be decoded, and is counted in rollout/failed"
        yield Caution(f"tasks.{taskset.name}", "images that can be decoded", found, do)


def _counted(prompts: Sequence[Iterable[Message]]) -> set[int]:
    """The places of the prompts whose tokens are counted: those with the longest texts, and evenly spaced ones."""
    sizes = [sum(len(message.content) for message in messages) for messages in prompts]
    longest = sorted(range(len(sizes)), key=lambda place: -sizes[place])[:_MEASURED]
    return {*longest, *range(0, len(sizes), max(1, len(sizes) // _MEASURED))}


# --------------------------------------------------------------------------- rows to learn from


def _order_problems(stage: _StageHere) -> Iterator[Problem]:
    """Checks the curriculum, and the expert completions in every row that a step or the held-out loss may use."""
    config = stage.config
    renderer, folder, section = stage.renderer, Path(config.run.dir), config.buffer
    learns_from_rows = isinstance(section, FileBuffer.Config)
    if renderer is None or (config.schedule.curriculum is None and not learns_from_rows):
        return
    tasks = {
        name: source for name in config.tasks if (source := stage.sources.get(_source_key(config, name))) is not None
    }
    whole = Stage(config, stage.number, 0, True, folder, folder, sources=tasks)  # only its schedule is built
    schedule = yield from attempt("tasks.train", lambda: build_schedule(whole))
    if schedule is None or not learns_from_rows:
        return
    orders = {"train": (schedule, config.schedule.steps * schedule.fresh_per_step)}
    name = config.evaluation.held_out
    held_out = (yield from attempt(f"tasks.{name}", lambda: tasks_of(whole, name))) if name is not None else None
    if name is not None and held_out is not None:
        orders[name] = replace(schedule, tasks=held_out, shuffle=False, curriculum=None), len(held_out)
    for taskset, (order, num_rows) in orders.items():
        yield from _row_problems(stage, config, taskset, order, num_rows)


def _row_problems(
    stage: _StageHere, config: RunConfig, taskset: str, schedule: Schedule, num_rows: int
) -> Iterator[Problem]:
    """Checks the completions in the first `num_rows` rows of a taskset, in the order of `schedule`."""
    section, folder, shape = config.buffer, Path(config.run.dir), shape_in(config)
    renderer, counts = stage.renderer, stage.counts
    assert isinstance(section, FileBuffer.Config)
    assert renderer is not None
    places = _Taskset(config, taskset, schedule.tasks, None, renderer, counts, f"tasks.{taskset}").places
    limit, total = longest_row(config, taskset), min(len(places), num_rows)
    texts = [texts_of(schedule.at(slot).task) for slot in range(total)]
    counted = _counted(texts)
    slots = [
        slot
        for slot in range(total)
        if slot < _FIRST_ROWS or slot in counted or (limit and not surely_within(limit, texts[slot]))
    ]
    buffer = FileBuffer(section, schedule=schedule, rollouts=folder, renderer=renderer, deadline_s=1.0)
    groups = yield from attempt(f"tasks.{taskset}", lambda: asyncio.run(buffer.taken_groups(slots)))
    counts.num_rows += total
    counts.rows += [length for group in groups or () if (length := max(_length(t) for t in group.trajectories))]
    held = _holder("the model", shape and shape.max_positions, limit or 0)
    too_long = [
        f"task {group.task.task_id!r} has {length} tokens, and {held}"
        for group in groups or ()
        if limit and (length := max(_length(t) for t in group.trajectories)) > limit
    ]
    if too_long:
        found = f"{len(too_long)} of {total} do not: {too_long[0]}"
        do = f"set tasks.{taskset}.on_overlong to drop or cut them"
        yield Problem(f"tasks.{taskset}", "rows that fit the model", found, do)


def _holder(what: str, held: int | None, longest: int) -> str:
    """What bounds the tokens of a row: what holds so many, or the key of the taskset."""
    return f"max_tokens is {longest}" if held is None or longest + 1 < held else f"{what} holds {held}"


def _length(trajectory: Trajectory) -> int:
    """Returns the number of tokens of the longest turn, prompt included."""
    return max(len(turn.prompt_tokens) + len(turn.tokens) for turn in trajectory.turns)
