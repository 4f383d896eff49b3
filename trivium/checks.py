"""What sections of a config must be to each other: each check yields every problem it sees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trivium.errors import Problem, TriviumError
from trivium.registry import resolve, suggest
from trivium.synchronizer import TRAINER, SyncStyle
from trivium.types import SERVED

if TYPE_CHECKING:
    from trivium.config import RunConfig

SETTLED = "in a deterministic run that is ahead of its trainer"
"""How problems speak of a run whose `slots_are_settled`."""


def _check_schedule(config: RunConfig) -> Iterator[Problem]:
    schedule, sync = config.schedule, config.sync
    if schedule.max_staleness is not None and schedule.max_staleness != config.max_staleness:
        yield Problem(
            "sync.offset", f"max_staleness {schedule.max_staleness} and offset {sync.offset}",
            f"interval - 1 + offset is {config.max_staleness}", "say one of the two",
        )  # fmt: skip
    if config.max_staleness < sync.interval - 1:
        yield Problem(
            "schedule.max_staleness", f"{config.max_staleness} with sync.interval {sync.interval}",
            "the explorer would wait for weights that are only published after groups it may not play",
            f"set schedule.max_staleness to at least {sync.interval - 1}",
        )  # fmt: skip
    if schedule.deterministic and sync.style is not SyncStyle.FIXED:
        yield Problem(
            "sync.style", f"the style {sync.style} in a deterministic run",
            "when weights travel would follow who is faster, and with it which version plays a group",
            "use style fixed, or leave schedule.deterministic out",
        )  # fmt: skip
    if schedule.curriculum is not None and not schedule.shuffle:
        yield Problem(
            "schedule.shuffle", "tasks in their own order", "the curriculum orders them", "leave one of the keys out"
        )
    if "train" not in config.tasks:
        yield Problem("tasks", "a taskset named `train`", suggest("train", config.tasks), "name one `train`")


def _check_channel(config: RunConfig) -> Iterator[Problem]:
    """Separate commands need a buffer and a channel that both reach; the channel says what it can do."""
    sync, mode, buffer = config.sync, config.run.mode, resolve("buffers", config.buffer.kind)
    shared = hasattr(buffer, "open_board")
    if mode in ("explore", "train") and getattr(buffer, "explored", True) and not shared:
        yield Problem(
            "buffer.kind", f"run.mode {mode!r} over a buffer of kind {config.buffer.kind!r}",
            "no other process reaches it: the two halves would never meet", "use buffer.kind: sql, or run.mode: both",
        )  # fmt: skip
    try:
        channel = resolve("channels", sync.method)
    except TriviumError as error:
        yield Problem("sync.method", f"the method {sync.method!r}", error.found, error.do)
        return
    if shared and mode in ("explore", "train", "serve") and getattr(channel, "local", False):
        yield Problem(
            "sync.method", f"{sync.method!r} with run.mode {mode!r} over a shared buffer",
            "trainer and explorers are separate commands, and it carries weights within one process",
            "use checkpoint (a directory that all see) or nccl (a broadcast)",
        )  # fmt: skip
    together = config.cluster.kind == "local" and (mode == "both" or (mode == "serve" and not shared))
    if together and getattr(channel, "collective", False):
        yield Problem(
            "sync.method", f"{sync.method!r} where trainer and explorer are one process",
            "a broadcast needs processes on both ends", "use memory",
        )  # fmt: skip
    if config.slots_are_settled and getattr(channel, "collective", False):
        yield Problem(
            "sync.method", f"{sync.method!r} {SETTLED}",
            "a resumed run plays slots with earlier versions, and of what was broadcast nothing is kept",
            "use checkpoint, or set schedule.max_staleness or schedule.deterministic back",
        )  # fmt: skip
    if sync.dir is not None and not getattr(channel, "in_directory", True):
        yield Problem(
            "sync.dir", f"sync.dir with sync.method {sync.method!r}", "it keeps no files, so the key has no effect",
            "use sync.method: checkpoint, or leave the key out",
        )  # fmt: skip


def _check_sampling(config: RunConfig) -> Iterator[Problem]:
    sampling = config.engine.sampling
    for name in sampling.changes_distribution():
        yield Problem(
            f"engine.sampling.{name}", f"{name} = {getattr(sampling, name)} in training",
            "it changes the sampled distribution, and the trainer does not replay it",
            "leave it out here; evaluation.sampling may use it",
        )  # fmt: skip
    if sampling.temperature == 0:
        yield Problem(
            "engine.sampling.temperature", "greedy sampling in training",
            "every member of a group would be the same reply", "use a temperature above 0",
        )  # fmt: skip


def _check_evaluation(config: RunConfig) -> Iterator[Problem]:
    evaluation, best = config.evaluation, config.checkpoint.keep_best
    measured = [f"eval/{evaluation.taskset}/{name}" for name in ("accuracy", "reward", "response_tokens")]
    if best is not None and best not in measured:
        yield Problem(
            "checkpoint.keep_best", f"the metric {best!r}", "no evaluation measures it", suggest(best, measured)
        )
    if evaluation.taskset is None:
        for name in (n for n, f in type(evaluation).model_fields.items() if getattr(evaluation, n) != f.default):
            yield Problem(
                f"evaluation.{name}", f"evaluation.{name} without evaluation.taskset",
                "nothing is evaluated, so the key has no effect", "name a taskset, or leave the key out",
            )  # fmt: skip
        return
    if evaluation.taskset not in config.tasks:
        known = suggest(evaluation.taskset, config.tasks)
        yield Problem("evaluation.taskset", f"the taskset {evaluation.taskset!r}", "no such taskset", known)
    for k in evaluation.k:
        if not 1 <= k <= evaluation.samples:
            yield Problem(
                "evaluation.k", f"pass@{k}", f"{evaluation.samples} sample(s) per task", "use 1 <= k <= samples"
            )
    if evaluation.sampling.temperature == 0 and evaluation.samples > 1:
        yield Problem(
            "evaluation.samples", f"{evaluation.samples} greedy samples", "they would all be the same",
            "use samples: 1, or a temperature",
        )  # fmt: skip
    if evaluation.every % config.sync.interval:
        yield Problem(
            "evaluation.every", f"evaluation every {evaluation.every} steps",
            f"weights are published every {config.sync.interval} steps, so others would be evaluated",
            "make it a multiple of sync.interval",
        )  # fmt: skip


def _check_rewards(config: RunConfig) -> Iterator[Problem]:
    """A workflow class may say that playing earns nothing (`earns = False`): then somebody else must judge.

    An algorithm may not ask what a reply was worth; an evaluation always does.
    """
    judged_later = getattr(resolve("sample_strategies", config.buffer.strategy.kind), "judges", False)
    if config.rewards or judged_later or getattr(resolve("workflows", config.workflow.kind), "earns", True):
        return
    explored = getattr(resolve("buffers", config.buffer.kind), "explored", False)
    played = explored and config.algorithm.reads_rewards and not _served(config)
    if played or config.evaluation.taskset is not None:
        yield Problem(
            "rewards", f"a reward for what is {'played' if played else 'evaluated'}",
            f"none, and the workflow {config.workflow.kind!r} earns nothing",
            "name a reward, for example rewards: [exact]",
        )  # fmt: skip


def _served(config: RunConfig) -> bool:
    """Whether agents bring the tasks, and judge how they were played."""
    return config.run.mode == "serve" or ("train" in config.tasks and config.tasks["train"].kind == SERVED)


def _check_serving(config: RunConfig) -> Iterator[Problem]:
    """Agents come over HTTP with their own tasks, when they like."""
    mode, explored = config.run.mode, getattr(resolve("buffers", config.buffer.kind), "explored", False)
    for name, tasks in config.tasks.items():
        if tasks.kind == SERVED and (name != "train" or not explored or mode in ("both", "explore")):
            yield Problem(
                f"tasks.{name}", f"{SERVED!r} tasks: those that agents bring",
                f"here run.mode {mode!r} plays or reads tasks itself",
                "say it of `train` alone, with run.mode: serve (and `train` over a shared buffer), or name tasks",
            )  # fmt: skip
    played = config.evaluation.taskset
    if played is not None and played in config.tasks and config.tasks[played].kind == SERVED:
        yield Problem(
            "evaluation.taskset", f"an evaluation on {played!r}", "its tasks come with agents: there is none to play",
            "name a taskset that has tasks of its own",
        )  # fmt: skip
    if mode != "serve":
        return
    if config.schedule.deterministic:
        yield Problem(
            "schedule.deterministic", "a deterministic run that serves agents",
            "which task comes when is their affair, no function of the run's seeds",
            "leave it out; max_staleness: 0 still trains groups in the order in which they were begun",
        )  # fmt: skip
    if config.cluster.kind != "local":
        yield Problem(
            "cluster.kind", f"run.mode serve on {config.cluster.kind}", "the endpoint lives in the command's process",
            "use cluster.kind: local; any number of serve commands may share a buffer",
        )  # fmt: skip


def _check_cluster(config: RunConfig) -> Iterator[Problem]:
    """On Ray one command plays both halves; in one process there is one of each."""
    cluster, mode = config.cluster, config.run.mode
    if config.run.explorer == TRAINER:
        yield Problem(
            "run.explorer", f"an explorer named {TRAINER!r}", "that is the trainer's name", "choose another one"
        )
    if cluster.kind == "ray" and mode in ("explore", "train"):
        yield Problem(
            "run.mode", f"{mode!r} on Ray", "on a cluster one command starts explorers and trainer",
            "use run.mode: both, or cluster.kind: local for commands that meet in a shared buffer",
        )  # fmt: skip
    for name in ("address", "explorers", "engines", "ranks", "max_restarts"):
        if cluster.kind == "local" and getattr(cluster, name) != type(cluster).model_fields[name].default:
            yield Problem(
                f"cluster.{name}", f"cluster.{name} without a cluster", "all roles are one process, one of each",
                "set cluster.kind to ray, or leave the key out",
            )  # fmt: skip
    if cluster.kind == "ray" and config.run.explorer:
        yield Problem(
            "run.explorer", f"an explorer named {config.run.explorer!r}", "on Ray they are named explorer-0, -1, ...",
            "leave the key out",
        )  # fmt: skip


def _check_replaced(config: RunConfig) -> Iterator[Problem]:
    """What would make it depend on timing who plays what, and with which weights."""
    schedule, workflow = config.schedule, config.workflow
    if workflow.min_members > schedule.group_size:
        yield Problem(
            "workflow.min_members", f"groups with at least {workflow.min_members} living members",
            f"schedule.group_size is {schedule.group_size}, so every group would be dropped", "lower it",
        )  # fmt: skip
    if workflow.min_members > 1 and workflow.max_failed_fraction == 1:
        yield Problem(
            "workflow.max_failed_fraction", "1 with workflow.min_members",
            "dropped groups would be replaced for ever, and nothing would end the run", "set it below 1",
        )  # fmt: skip
    if workflow.min_members > 1 and config.slots_are_settled:
        yield Problem(
            "workflow.min_members", f"dropped groups replaced {SETTLED}",
            "which version plays a slot would depend on what is dropped before it",
            "set workflow.min_members, schedule.max_staleness or schedule.deterministic back",
        )  # fmt: skip
    if schedule.over_rollout and schedule.deterministic:
        yield Problem(
            "schedule.over_rollout", "more groups than a step needs in a deterministic run",
            "which of them are trained on depends on timing", "leave one of the keys out",
        )  # fmt: skip


def _check_in_flight(config: RunConfig) -> Iterator[Problem]:
    if config.sync.in_flight == "finish":
        return
    if config.schedule.deterministic:
        yield Problem(
            "sync.in_flight", "weights that change in mid-reply in a deterministic run",
            "which token is sampled by which version depends on timing", "leave one of the keys out",
        )  # fmt: skip
    if not getattr(resolve("engines", config.engine.kind), "updates_in_flight", False):
        yield Problem(
            "sync.in_flight", "weights that change in mid-reply",
            f"engine.kind {config.engine.kind!r} does not offer it", "set sync.in_flight to finish",
        )  # fmt: skip


CHECKS = (
    _check_schedule,
    _check_channel,
    _check_replaced,
    _check_in_flight,
    _check_sampling,
    _check_evaluation,
    _check_rewards,
    _check_serving,
    _check_cluster,
)
