"""Checks before a run, without starting it: files, rows, rewards, devices, packages.

`trivium check` prints it; a run refuses and warns by it, so the two cannot disagree.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from trivium.buffers.files import FileBuffer, is_conversation
from trivium.concurrency import usable_cores
from trivium.config import RunConfig
from trivium.config.machine import Machine
from trivium.config.memory_estimate import context_limit, planned, shape_in
from trivium.config.reading import sections_of
from trivium.errors import ConfigError, DataError, MissingPackage, Problem, TriviumError
from trivium.models.backbone.huggingface import HuggingFaceModel
from trivium.models.vision.images import check_image, decoded, images_of
from trivium.protocols import TaskSource
from trivium.registry import resolve
from trivium.rewards.judge import Judge, make_judge
from trivium.rewards.model import ModelReward
from trivium.rewards.recipe import changed
from trivium.runtime.build import build_schedule, build_tasks, digest_of, shares_buffer
from trivium.runtime.stage import Stage
from trivium.runtime.stage_models import stage_problems
from trivium.runtime.train_engines import check_vocabulary
from trivium.schedule import Schedule
from trivium.serving.serve import read_key
from trivium.text import hf_tokenizer
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import TinyModel
from trivium.text.tiny_vision import TinyVisionModel
from trivium.types import SERVED, Message, Task, Trajectory, capabilities_of
from trivium.workflows.single_turn import SingleTurn

T = TypeVar("T")

_MESSAGE_TOKENS = 64
"""Upper bound on what a chat template adds to a message: a prompt that fits with this much added is not rendered to be
counted."""
_MADE_TASKS = 1000
"""Number of tasks checked of a source that generates them on access; a source that holds its rows is checked in
full."""
_FIRST_ROWS = 64
"""Number of expert completions checked in full; of further rows, only those that may be too long."""
_FIRST_IMAGES = 256
"""Number of prompts with images that are rendered; of further ones, only the images are decoded."""
_DECODING_S = 20.0
"""How long images are decoded. Of the others, only the headers and checksums are checked."""
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
    """Problems that prevent a run of the config here, and warnings."""

    problems: list[Problem] = field(default_factory=list[Problem])
    warnings: list[Problem] = field(default_factory=list[Problem])
    rows: dict[str, str] = field(default_factory=dict[str, str])
    """The `RowTasks.digest` of each task source that reads rows, by its place in the config."""

    def refuse(self) -> None:
        """Raises ConfigError with all problems, if there are any."""
        if self.problems:
            found = f"{len(self.problems)} problem(s)"
            raise ConfigError("a config that can run here", found, "fix them all at once:", self.problems)

    def warn(self, where: str, asked: str, failing: Sequence[str], total: int, remedy: str) -> None:
        """Warns of rows, of which the first is described, if there are any."""
        if failing:
            found = f"{len(failing)} of {total} have others: {failing[0]}"
            self.warnings.append(Problem(where, asked, found, remedy))

    def attempt(self, where: str, make: Callable[[], T]) -> T | None:
        """The result of `make`; None if it fails, which is reported as a problem."""
        try:
            return make()
        except TriviumError as error:
            self.problems.append(Problem(where, error.asked, error.found, error.do))
        except OSError as error:
            self.problems.append(Problem(where, "read what it names", f"{type(error).__name__}: {error}", "correct it"))
        return None


def preflight(config: RunConfig, here: Machine, ranks: int) -> Findings:
    """Checks everything that the stages of a config read or use on this machine, on which `ranks` ranks train."""
    findings = Findings()
    findings.problems += [*_directory_problems(Path(config.run.dir)), *stage_problems(config)]
    sources: dict[str, TaskSource | None] = {}
    for number, stage in enumerate(config.stage_configs()):
        own = Findings()
        own.problems += [*_device_problems(stage, here, ranks), *_package_problems(stage)]
        own.warnings += [*_device_warnings(stage, here, ranks), *_value_warnings(stage, number)]
        if stage.run.mode == "serve":
            own.attempt("serve.key_variable", lambda stage=stage: read_key(stage.serve.key_variable))
        _inspect(stage, number, own, sources)
        prefix = f"stages[{number}]." if config.stages else ""
        findings.rows |= {prefix + where: digest for where, digest in own.rows.items()}
        for into, problems in ((findings.problems, own.problems), (findings.warnings, own.warnings)):
            known = {problem[1:] for problem in into}  # by an earlier stage
            into += [Problem(prefix + p.where, p.asked, p.found, p.do) for p in problems if p[1:] not in known]
    return findings


def _inspect(config: RunConfig, number: int, findings: Findings, sources: dict[str, TaskSource | None]) -> None:
    """Checks one stage; what depends on a broken part is skipped. `sources` are the task sources read so far."""
    for where, section in sections_of(config):
        findings.problems += section.machine_problems(config, where)
        findings.warnings += section.warnings(config, where)
    teacher = getattr(config.algorithm, "teacher", None)
    if teacher is not None and isinstance(config.model, HuggingFaceModel.Config):
        paths = Path(teacher.path), Path(config.model.path)
        findings.attempt("algorithm.teacher", lambda: check_vocabulary(*paths))
    renderer = findings.attempt("model", lambda: _renderer(config))
    # With workers, a class is known by its signature: a reward model is not loaded to see what it reads, nor is any
    # reward built where it is not called, which may lack what it needs (a GPU, a service).
    elsewhere = config.cluster.kind == "ray" or not _explores_here(config)
    rewards = changed(
        config.rewards,
        lambda r: r.model_copy(update={"workers": 1}) if elsewhere or isinstance(r, ModelReward.Config) else r,
    )
    judge = findings.attempt("rewards", lambda: make_judge(rewards, config.workflow.deadline_s))
    for name, section in config.tasks.items():
        key = f"{name} {section.model_dump_json()}"
        if section.kind != SERVED and key not in sources:
            sources[key] = findings.attempt(f"tasks.{name}", lambda name=name: build_tasks(config, name))
        tasks = sources.get(key)
        if tasks is None:
            continue
        if digest := digest_of(tasks):
            findings.rows[f"tasks.{name}"] = digest
        if judge is not None and _is_rolled_out(config, name):
            _look_at_columns(config, findings, name, tasks, judge)
        if id_column := getattr(section, "id", None):
            same = [f"an id of column {id_column!r} that occurred before"] * getattr(tasks, "num_duplicates", 0)
            remedy = "make the ids unique: a number is added to the later ones"
            findings.warn(f"tasks.{name}", "rows with ids of their own", same, len(tasks), remedy)
        if renderer is not None:
            _look_at_prompts(config, findings, name, tasks, renderer)
    if renderer is not None and not findings.problems:
        _look_at_order(config, number, findings, renderer)


def _look_at_columns(config: RunConfig, findings: Findings, taskset: str, tasks: TaskSource, judge: Judge) -> None:
    """Checks the columns of the tasks against what reads them."""
    where, columns = f"tasks.{taskset}", [tasks[place].columns for place in _seen(tasks)]
    lacking = [text for each in columns if (text := judge.lacking(each))]
    what = "tasks with the columns that the rewards read"
    remedy = "map a column to this name in the task source, or give the reward's parameter a default"
    _count(config, findings, taskset, what, lacking, len(columns), remedy)
    misfits = [text for each in columns if (text := judge.misfits(each))]
    remedy = "write the column as text, or convert it in the reward"
    findings.warn(where, "columns of the rewards' types", misfits, len(columns), remedy)
    if isinstance(config.workflow, SingleTurn.Config) and not judge.reads("tools"):
        unused = "a column `tools`, which neither the workflow nor a reward reads"
        tools = [unused for each in columns if each.get("tools")]
        remedy = "describe the tools in the prompt, or use a workflow that offers them"
        findings.warn(where, "columns that have an effect", tools, len(columns), remedy)


def _value_warnings(config: RunConfig, number: int) -> Iterator[Problem]:
    """Warns of values that are valid and rarely meant."""
    lr = getattr(getattr(config.train, "optimizer", None), "lr", None)
    is_random = number == 0 and isinstance(config.model, TinyModel.Config | TinyVisionModel.Config)
    if is_random and lr and lr < _LEAST_RANDOM_LR:
        asked, found = "a learning rate for a model with random weights", f"{lr:g}, a rate for fine-tuning"
        yield Problem("train.optimizer.lr", asked, found, "set train.optimizer.lr to about 1e-3")
    limit, sampling = context_limit(config), getattr(config.engine, "sampling", None)
    wanted = sampling.max_new_tokens if sampling and "max_new_tokens" in sampling.model_fields_set else 0
    if limit is not None and wanted >= limit and _is_rolled_out(config, "train"):
        found = f"the context holds {limit}, prompts included"
        remedy = "lower it, or raise engine.max_context: completions end where the context does"
        yield Problem("engine.sampling.max_new_tokens", f"completions of {wanted} tokens", found, remedy)


def _is_rolled_out(config: RunConfig, taskset: str) -> bool:
    """Whether an explorer rolls the taskset out, so that rewards judge it."""
    explored = capabilities_of(resolve("buffers", config.buffer.kind)).explored
    return taskset == config.evaluation.taskset or (taskset == "train" and explored)


def _explores_here(config: RunConfig) -> bool:
    return config.run.mode != "train"


def _trains_here(config: RunConfig) -> bool:
    return config.run.mode != "explore" and not (config.run.mode == "serve" and shares_buffer(config))


def _seen(tasks: TaskSource) -> range:
    """The indices of the tasks to check."""
    return range(len(tasks) if digest_of(tasks) else min(len(tasks), _MADE_TASKS))


def _count(
    config: RunConfig, findings: Findings, taskset: str, asked: str, failing: Sequence[str], total: int, remedy: str
) -> None:
    """Reports the tasks that cannot succeed: as a warning, or as a problem if there are more than may fail."""
    if failing:
        fatal = len(failing) == total or len(failing) > config.workflow.max_failed_fraction * total
        problem = Problem(f"tasks.{taskset}", asked, f"{len(failing)} of {total} do not: {failing[0]}", remedy)
        (findings.problems if fatal else findings.warnings).append(problem)


# --------------------------------------------------------------------------- tokenizer and prompts


def _renderer(config: RunConfig) -> ChatRenderer | None:
    """The renderer of the model, without loading the model; None for a user's own kind of model."""
    model, max_pixels = config.model, config.workflow.max_image_pixels
    if isinstance(model, TinyModel.Config):
        images = TinyVisionModel.images(model, max_pixels) if isinstance(model, TinyVisionModel.Config) else None
        return ChatRenderer(model.tokenizer(), images=images)
    if not isinstance(model, HuggingFaceModel.Config):
        return None
    try:
        tokenizer = hf_tokenizer(Path(model.path))
    except (ValueError, KeyError, TypeError, ImportError) as error:  # what transformers raises for damaged files
        if isinstance(error, TriviumError):
            raise
        raise ConfigError(
            f"the tokenizer in {model.path}",
            f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
            "save the model's tokenizer there (tokenizer.save_pretrained)",
        ) from error
    images = images_of(model.path, max_pixels=max_pixels)
    return ChatRenderer(tokenizer, chat_template=model.template(), images=images)


def _look_at_prompts(
    config: RunConfig, findings: Findings, taskset: str, tasks: TaskSource, renderer: ChatRenderer
) -> None:
    """Counts the prompts that cannot be rendered or that leave no space for a completion, and those with characters
    that no token stands for."""
    if not isinstance(config.workflow, SingleTurn.Config) or not _is_rolled_out(config, taskset):
        _look_at_images(config, findings, taskset, tasks)
        return  # another workflow makes its own prompts
    limit, workflow = context_limit(config), SingleTurn(config.workflow)
    small_alphabet = isinstance(config.model, TinyModel.Config)
    too_long, unreadable, refused, seen = list[str](), list[str](), list[str](), _seen(tasks)
    pictured = 0
    for task in (tasks[place] for place in seen):
        messages = workflow.prompt(task)
        has_images = any(message.media for message in messages)
        pictured += has_images
        short = limit is None or (_surely_below(limit, messages) and not small_alphabet)
        if pictured > _FIRST_IMAGES if has_images else short:
            continue
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                length = len(renderer.render(messages))
            except DataError as error:
                refused.append(f"task {task.task_id!r}: {error.found}")
                continue
        if limit is not None and length >= limit:
            too_long.append(f"task {task.task_id!r} has {length} tokens, and the context holds {limit}")
        if caught:
            unreadable.append(f"task {task.task_id!r}: {messages[-1].content!r:.60}")
    what, remedy = "prompts that can be rendered", "give them the roles that the model was trained on, and whole images"
    _count(config, findings, taskset, what, refused, len(seen), remedy)
    if pictured > _FIRST_IMAGES:
        _look_at_images(config, findings, taskset, tasks)
    what = "prompts that leave space for a completion"
    _count(config, findings, taskset, what, too_long, len(seen), "shorten or drop them, or raise engine.max_context")
    what, remedy = "prompts of the model's characters", "add them to model.alphabet, or set it to bytes"
    findings.warn(f"tasks.{taskset}", what, unreadable, len(seen), remedy + ": the policy cannot see them")


def _look_at_images(config: RunConfig, findings: Findings, taskset: str, tasks: TaskSource) -> None:
    """Counts the tasks with images that are damaged or too large."""
    failing, seen, skipped, end = list[str](), _seen(tasks), 0, time.monotonic() + _DECODING_S
    for task in (tasks[place] for place in seen):
        look = decoded if time.monotonic() < end else check_image
        skipped += look is check_image and any(message.media for message in task.prompt)
        try:
            for item in (item for message in task.prompt for item in message.media):
                look(item, config.workflow.max_image_pixels)
        except DataError as error:
            failing.append(f"task {task.task_id!r}: {error.found}")
    _count(config, findings, taskset, "tasks with images that can be read", failing, len(seen), "give whole images")
    if skipped:
        found = f"{skipped} tasks have images of which only headers and checksums were checked in {_DECODING_S:.0f} s"
        remedy = "nothing: a rollout fails if its image cannot be decoded, and is counted in rollout/failed"
        findings.warnings.append(Problem(f"tasks.{taskset}", "images that can be decoded", found, remedy))


def _surely_below(limit: int, messages: Iterable[Message]) -> bool:
    """Whether a prompt is certainly shorter than this: a token stands for at least one byte."""
    return sum(len(message.content.encode(errors="replace")) + _MESSAGE_TOKENS for message in messages) < limit


def _look_at_order(config: RunConfig, number: int, findings: Findings, renderer: ChatRenderer) -> None:
    """Checks the curriculum, and the expert completions in every row that a step or the held-out loss may use."""
    learns_from_rows = isinstance(config.buffer, FileBuffer.Config)
    if config.schedule.curriculum is None and not learns_from_rows:
        return
    folder = Path(config.run.dir)
    schedule = findings.attempt("tasks.train", lambda: build_schedule(Stage(config, number, 0, True, folder, folder)))
    if schedule is None or not learns_from_rows:
        return
    _look_at_rows(config, findings, "train", schedule, config.schedule.steps * schedule.fresh_per_step, renderer)
    name = config.evaluation.held_out
    tasks = findings.attempt(f"tasks.{name}", lambda: build_tasks(config, name)) if name is not None else None
    if name is not None and tasks is not None:
        held_out = replace(schedule, tasks=tasks, shuffle=False, curriculum=None)
        _look_at_rows(config, findings, name, held_out, len(tasks), renderer)


def _look_at_rows(
    config: RunConfig, findings: Findings, taskset: str, schedule: Schedule, taken: int, renderer: ChatRenderer
) -> None:
    """Checks the completions in the first `taken` rows of a taskset, in the order of `schedule`."""
    section, folder, shape = config.buffer, Path(config.run.dir), shape_in(config)
    assert isinstance(section, FileBuffer.Config)
    limit, total = None if shape is None else shape.max_positions, min(len(_seen(schedule.tasks)), taken)
    slots = [
        slot
        for slot in range(total)
        if slot < _FIRST_ROWS or (limit and not _surely_below(limit, _texts(schedule.at(slot).task)))
    ]
    buffer = FileBuffer(section, schedule=schedule, rollouts=folder, renderer=renderer, deadline_s=1.0)
    groups = findings.attempt(f"tasks.{taskset}", lambda: asyncio.run(buffer.taken_groups(slots)))
    too_long = [
        f"task {group.task.task_id!r} has {length} tokens, and the model holds {limit}"
        for group in groups or ()
        if limit and (length := max(_length(t) for t in group.trajectories)) > limit
    ]
    if too_long:
        found = f"{len(too_long)} of {total} do not: {too_long[0]}"
        findings.problems.append(Problem(f"tasks.{taskset}", "rows that fit the model", found, "shorten or drop them"))


def _texts(task: Task) -> list[Message]:
    """A task's prompt and everything that may be a completion of it, as messages."""
    texts = [
        entry["content"]
        for value in task.columns.values()
        for entry in (value["conversation"] if is_conversation(value) else [{"content": str(value)}])
    ]
    return [*task.prompt, *(Message("assistant", text) for text in texts)]


def _length(trajectory: Trajectory) -> int:
    return max(len(turn.prompt_tokens) + len(turn.tokens) for turn in trajectory.turns)


# --------------------------------------------------------------------------- the machine


def _directory_problems(run_dir: Path) -> Iterator[Problem]:
    """Reports a run directory that cannot be created or written to; leaves no files behind."""
    try:
        above = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.exists())
        tempfile.TemporaryDirectory(dir=above).cleanup()
    except OSError as error:
        found = f"{type(error).__name__}: {error.strerror}"
        yield Problem("run.dir", f"write to {run_dir}", found, "choose a directory that can be written")


def _device_problems(config: RunConfig, here: Machine, ranks: int) -> Iterator[Problem]:
    """Reports GPUs that this machine lacks. A running Ray cluster, the trainer of a separate explorer and the explorers
    of a separate trainer may be on other machines. `ranks`: training ranks on this machine."""
    if config.cluster.address is not None:
        return
    gpus, cluster = len(here.gpus), config.cluster
    engines = cluster.explorers * cluster.engines
    engine = getattr(config.engine, "device", "cpu") if _explores_here(config) else "cpu"
    train = getattr(config.train, "device", "cpu") if _trains_here(config) else "cpu"
    if engine == "cuda" and train != "cpu" and cluster.kind == "ray" and max(engines, ranks) <= gpus < engines + ranks:
        found, do = f"there are {gpus}", "lower cluster.engines or cluster.ranks, or set engine.device to auto"
        yield Problem("cluster.engines", f"{engines + ranks} engines and ranks with a GPU each", found, do)
    for where, device, wanted in (("engine", engine, engines), ("train", train, ranks)):
        if where == "engine" and device == "auto":
            continue  # on the CPU where there are too few
        if device.startswith("cuda") and not gpus:
            yield Problem(f"{where}.device", device, "torch sees no GPU here", f"set {where}.device to cpu")
        elif device != "cpu" and gpus and wanted > gpus and (where == "train" or cluster.kind == "ray"):
            key = "cluster.ranks" if where == "train" else "cluster.engines"
            yield Problem(key, f"{wanted} processes with a GPU each", f"there are {gpus}", "lower it, or use the CPU")


def _device_warnings(config: RunConfig, here: Machine, ranks: int) -> Iterator[Problem]:
    """Warns of engines that sample on the CPU while training uses GPUs, and of threads asked for in another way."""
    threads, wanted = config.cluster.threads or usable_cores(), os.environ.get("OMP_NUM_THREADS", "")
    if config.cluster.kind == "local" and ranks == 1 and wanted not in ("", str(threads)):
        found = f"OMP_NUM_THREADS is {wanted}, which has no effect: cluster.threads counts"
        yield Problem("cluster.threads", f"up to {threads} threads", found, f"set cluster.threads: {wanted} for that")
    engine, train = getattr(config.engine, "device", None), str(getattr(config.train, "device", "cpu"))
    trains_on_gpu = planned(train, "auto", here)[0] == "cuda"
    if engine == "cpu" and trains_on_gpu:
        asked, found = "an engine on the CPU beside a trainer on a GPU", f"train.device is {train}"
        yield Problem("engine.device", asked, found, "set it to auto, or to cuda")
    cluster, gpus = config.cluster, len(here.gpus)
    wanted = cluster.explorers * cluster.engines + cluster.ranks * trains_on_gpu
    if engine == "auto" and cluster.kind == "ray" and cluster.address is None and 0 < gpus < wanted:
        found = f"{gpus} for {wanted} engines and training ranks: the engines sample on the CPU"
        do = "lower cluster.engines or cluster.ranks; with cluster.kind local both share one GPU"
        yield Problem("engine.device", "a GPU for each engine", found, do)


def _package_problems(config: RunConfig) -> Iterator[Problem]:
    """Reports optional packages that the config needs and that are not installed, without importing them."""
    needed = [(f"monitors[{n}]", *_MONITORS[m.kind]) for n, m in enumerate(config.monitors) if m.kind in _MONITORS]
    if config.cluster.kind == "ray":
        needed.append(("cluster.kind", "ray", "ray", "ray"))
    if config.run.mode == "serve":
        needed.append(("run.mode", "fastapi", "fastapi", "serve"))
    if getattr(config.train, "lora", None) is not None:
        needed.append(("train.lora", "peft", "peft", "peft"))
    for where, module, package, extra in needed:
        if importlib.util.find_spec(module) is None:
            error = MissingPackage(package, extra, f"what {where} asks for")
            yield Problem(where, error.asked, error.found, error.do)
