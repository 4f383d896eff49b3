"""The rules for a config: what its sections may not ask for together."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from fnmatch import fnmatchcase

from trivium.config.merging import is_mapping
from trivium.config.recording import can_score_prompts, recorded, replays_routing, scores_observations, shape_in
from trivium.config.rules import Rules
from trivium.config.schema import WITH_FIXED_VERSIONS, Config, RunConfig
from trivium.config.sections import ThresholdConfig
from trivium.foundation.errors import Problem, TriviumError
from trivium.foundation.metrics import METRICS, depends_on_machine
from trivium.foundation.registry import describe, resolve, suggest
from trivium.types import MIN_TEMPERATURE, SERVED, TRAINER, SyncStyle, capabilities_of

CONFIG_RULES = Rules[RunConfig]()


@CONFIG_RULES.rule
def check_schedule(config: RunConfig) -> Iterator[Problem]:
    """The schedule contradicts itself, the sync or the tasks."""
    schedule, sync = config.schedule, config.sync
    if schedule.max_staleness is not None and schedule.max_staleness != config.max_staleness:
        yield Problem(
            "sync.offset",
            f"max_staleness {schedule.max_staleness} and offset {sync.offset}",
            f"interval - 1 + offset is {config.max_staleness}",
            "set one of the two",
        )
    if config.max_staleness < sync.interval - 1:
        yield Problem(
            "schedule.max_staleness",
            f"{config.max_staleness} with sync.interval {sync.interval}",
            "deadlock: the next weights are published after train steps whose groups the explorer may not roll out yet",
            f"set schedule.max_staleness to at least {sync.interval - 1}",
        )
    if schedule.deterministic and sync.style is not SyncStyle.FIXED:
        yield Problem(
            "sync.style",
            f"the style {sync.style} in a deterministic run",
            "the time of a publication would depend on timing, and so would the version that samples a group",
            "use style fixed, or leave schedule.deterministic out",
        )
    if schedule.curriculum is not None and not schedule.shuffle:
        yield Problem(
            "schedule.shuffle", "tasks in their own order", "the curriculum orders them", "leave one of the keys out"
        )
    if isinstance(schedule.curriculum, Config):
        yield from schedule.curriculum.problems(config, "schedule.curriculum")
    if schedule.until is not None:
        yield from _check_threshold(schedule.until, config)
    if "train" not in config.tasks:
        yield Problem("tasks", "a taskset named `train`", suggest("train", config.tasks), "name one `train`")


def _check_threshold(until: ThresholdConfig, config: RunConfig) -> Iterator[Problem]:
    asked = f"a stage that ends by {until.metric!r}"
    yield from (Problem("schedule.until.metric", asked, *parts) for parts in _missing_metric(until.metric, config))
    if until.below is None and until.above is None:
        yield Problem("schedule.until", asked, "no threshold", "set schedule.until.below or schedule.until.above")


def _missing_metric(metric: str, config: RunConfig) -> Iterator[tuple[str, str]]:
    """(why, remedy) for a metric that no train step and no evaluation of a stage has."""
    evaluation, listed = config.evaluation, "name one that docs/metrics.md lists"
    if not any(fnmatchcase(metric, pattern) for pattern in METRICS):
        yield "no such metric", listed
    elif depends_on_machine(metric):
        yield "it depends on the machine", listed
    elif metric.startswith("eval/"):
        if metric.split("/")[1] not in (evaluation.taskset, evaluation.held_out):
            yield "no evaluation measures it", "name the taskset in evaluation.taskset"
        elif not evaluation.every:
            yield "evaluation.every is 0: no step before the last is evaluated", "set evaluation.every"


@CONFIG_RULES.rule
def check_sources(config: RunConfig) -> Iterator[Problem]:
    """Tasks of several sources in a stage that learns from rows."""
    buffer = config.buffer.kind
    for name in ("train", config.evaluation.held_out):
        several = name in config.tasks and config.tasks[name].kind == "sources"
        if several and not capabilities_of(resolve("buffers", buffer)).explored:
            found = f"buffer.kind {buffer!r} reads the rows of one"
            yield Problem(f"tasks.{name}", "tasks of several sources", found, "name one; its path may list files")


@CONFIG_RULES.rule
def check_channel(config: RunConfig) -> Iterator[Problem]:
    """A command does not reach the buffer or the weights of another one, or the channel does not fit."""
    sync, mode = config.sync, config.run.mode
    buffer = capabilities_of(resolve("buffers", config.buffer.kind))
    if mode in ("explore", "train") and buffer.explored and not buffer.shared:
        yield Problem(
            "buffer.kind",
            f"run.mode {mode!r} over a buffer of kind {config.buffer.kind!r}",
            "only one process can use it, so explorer and trainer could not exchange groups",
            "use buffer.kind: sql, or run.mode: both",
        )
    try:
        channel = capabilities_of(resolve("channels", sync.method))
    except TriviumError as error:
        yield Problem("sync.method", f"the method '{sync.method}'", error.found, error.do)
        return
    if buffer.shared and mode in ("explore", "train", "serve") and channel.local:
        yield Problem(
            "sync.method",
            f"'{sync.method}' with run.mode {mode!r} over a shared buffer",
            "trainer and explorers are separate commands, and it carries weights within one process",
            "use checkpoint (a directory that all processes can read) or nccl (a broadcast)",
        )
    together = config.cluster.kind == "local" and (mode == "both" or (mode == "serve" and not buffer.shared))
    if together and channel.collective:
        yield Problem(
            "sync.method",
            f"'{sync.method}' with trainer and explorer in one process",
            "a broadcast needs processes on both ends",
            "use memory",
        )
    if config.has_fixed_versions and channel.collective:
        yield Problem(
            "sync.method",
            f"'{sync.method}' {WITH_FIXED_VERSIONS}",
            "a resumed run rolls out slots with earlier versions, and a broadcast keeps no version",
            "use checkpoint, or set schedule.max_staleness or schedule.deterministic back",
        )
    if config.has_fixed_versions and channel.uses_directory and config.cluster.ranks > 1:
        yield Problem(
            "sync.method",
            f"'{sync.method}' with cluster.ranks {config.cluster.ranks} {WITH_FIXED_VERSIONS}",
            "the first rank writes the versions, so the trainer can neither save nor restore earlier ones",
            "use memory, or cluster.ranks: 1, or set schedule.max_staleness or schedule.deterministic back",
        )
    if sync.dir is not None and not channel.uses_directory:
        yield Problem(
            "sync.dir",
            f"sync.dir with sync.method '{sync.method}'",
            "it keeps no files, so the key has no effect",
            "use sync.method: checkpoint, or leave the key out",
        )
    if sync.full_every > 1 and not channel.sends_differences:
        yield Problem(
            "sync.full_every",
            f"differences between versions with sync.method '{sync.method}'",
            "it sends every version whole",
            "use sync.method: checkpoint, or leave the key out",
        )


@CONFIG_RULES.rule
def check_replaced(config: RunConfig) -> Iterator[Problem]:
    """Groups are dropped or replaced for ever, or in a run that must not depend on timing."""
    schedule, workflow = config.schedule, config.workflow
    if workflow.min_members > schedule.group_size:
        yield Problem(
            "workflow.min_members",
            f"groups with at least {workflow.min_members} successful members",
            f"schedule.group_size is {schedule.group_size}, so every group would be dropped",
            "lower it",
        )
    if workflow.min_members > 1 and workflow.max_failed_fraction == 1:
        yield Problem(
            "workflow.max_failed_fraction",
            "1 with workflow.min_members",
            "dropped groups would be replaced for ever, and the run would not end",
            "set it below 1",
        )
    if workflow.min_members > 1 and config.has_fixed_versions:
        yield Problem(
            "workflow.min_members",
            f"dropped groups replaced {WITH_FIXED_VERSIONS}",
            "the version that samples a slot would depend on the groups dropped before it",
            "set workflow.min_members, schedule.max_staleness or schedule.deterministic back",
        )
    if schedule.over_rollout and schedule.deterministic:
        yield Problem(
            "schedule.over_rollout",
            "more groups than a step needs in a deterministic run",
            "the choice of groups to train on would depend on timing",
            "leave one of the keys out",
        )


@CONFIG_RULES.rule
def check_in_flight(config: RunConfig) -> Iterator[Problem]:
    """Weights change within a completion, and engine or run do not allow it."""
    if config.sync.in_flight == "finish":
        return
    if config.schedule.deterministic:
        yield Problem(
            "sync.in_flight",
            "weights that change within a completion in a deterministic run",
            "the version that samples a token would depend on timing",
            "leave one of the keys out",
        )
    if not capabilities_of(describe("engines", config.engine.kind)).updates_in_flight:
        yield Problem(
            "sync.in_flight",
            "weights that change within a completion",
            f"engine.kind {config.engine.kind!r} does not offer it",
            "set sync.in_flight to finish",
        )


@CONFIG_RULES.rule
def check_sampling(config: RunConfig) -> Iterator[Problem]:
    """A temperature is too low to divide by, or gives a group equal completions."""
    sampling = config.engine.sampling
    for where, temperature in (
        ("engine.sampling.temperature", sampling.temperature),
        ("evaluation.sampling.temperature", config.evaluation.sampling.temperature or 0.0),
    ):
        if 0 < temperature < MIN_TEMPERATURE:
            yield Problem(
                where, f"temperature {temperature}", "logits divided by it overflow", f"use at least {MIN_TEMPERATURE}"
            )
    if sampling.temperature == 0:
        yield Problem(
            "engine.sampling.temperature",
            "greedy sampling in training",
            "every member of a group would be the same completion",
            "use a temperature above 0",
        )


@CONFIG_RULES.rule
def check_recording(config: RunConfig) -> Iterator[Problem]:
    """Training needs what rollouts do not record."""
    shape, kind = shape_in(config), config.engine.kind
    sampled = capabilities_of(resolve("buffers", config.buffer.kind)).explored
    records = capabilities_of(describe("engines", kind)).extra if sampled else frozenset(recorded(config))
    if replays_routing(config):
        where, asked = "train.router_replay", "the experts that rollouts were sampled with"
        if shape is not None and shape.experts == 1:
            yield Problem(where, asked, "the model has no experts", "leave the key out")
        if "routing" not in records:
            yield Problem(where, asked, f"engine.kind {kind!r} does not record them", "use engine.kind torch")
    for name in config.engine.sampling.changes_distribution():
        where, asked = f"engine.sampling.{name}", f"{name} = {getattr(config.engine.sampling, name)} in training"
        if "kept" not in records:
            yield Problem(
                where,
                asked,
                f"it changes the sampled distribution, and engine.kind {kind!r} does not record the kept tokens",
                "leave it out here (evaluation.sampling may use it), or use engine.kind torch",
            )


@CONFIG_RULES.rule
def check_evaluation(config: RunConfig) -> Iterator[Problem]:
    """An evaluation has no tasks, keys without effect, or metrics that it does not measure."""
    evaluation, best = config.evaluation, config.checkpoint.keep_best
    names = ("accuracy", "reward", "response_tokens") if evaluation.taskset is not None else ()
    names += ("observation_loss",) if names and scores_observations(config) else ()
    measured = [f"eval/{evaluation.taskset}/{name}" for name in names]
    if evaluation.held_out is not None:
        measured += [f"eval/{evaluation.held_out}/{name}" for name in ("loss", "preference_accuracy")]
        yield from _check_held_out(config, evaluation.held_out)
    if best is not None and best not in measured:
        remedy = suggest(best, measured) if measured else "name evaluation.taskset, or write checkpoint.keep_best=null"
        yield Problem("checkpoint.keep_best", f"the metric {best!r}", "no evaluation measures it", remedy)
    if evaluation.taskset is None:
        of_loss = ("held_out", "every") if evaluation.held_out is not None else ()
        changed = (n for n, f in type(evaluation).model_fields.items() if getattr(evaluation, n) != f.default)
        for name in (name for name in changed if name not in of_loss):
            yield Problem(
                f"evaluation.{name}",
                f"evaluation.{name} without evaluation.taskset",
                "nothing is evaluated, so the key has no effect",
                "name a taskset, or leave the key out",
            )
        return
    if evaluation.taskset not in config.tasks:
        suggestion = suggest(evaluation.taskset, config.tasks)
        yield Problem("evaluation.taskset", f"the taskset {evaluation.taskset!r}", "no such taskset", suggestion)
    if evaluation.observations:
        yield from _check_observations(config)
    for k in evaluation.k:
        if not 1 <= k <= evaluation.samples:
            yield Problem(
                "evaluation.k", f"pass@{k}", f"{evaluation.samples} sample(s) per task", "use 1 <= k <= samples"
            )
    if evaluation.sampling.temperature == 0 and evaluation.samples > 1:
        yield Problem(
            "evaluation.samples",
            f"{evaluation.samples} greedy samples",
            "they would all be the same",
            "use samples: 1, or a temperature",
        )
    if evaluation.every % config.sync.interval:
        yield Problem(
            "evaluation.every",
            f"evaluation every {evaluation.every} steps",
            f"weights are published every {config.sync.interval} steps, so an evaluation would see other weights",
            "make it a multiple of sync.interval",
        )


def _check_observations(config: RunConfig) -> Iterator[Problem]:
    where, asked = "evaluation.observations", "the cross-entropy of observations in evaluations"
    if not can_score_prompts(config):
        found = f"engine.kind {config.engine.kind!r} does not compute log-probabilities of a prompt's tokens"
        yield Problem(where, asked, found, "use engine.kind torch, or leave the key out")
    if not capabilities_of(resolve("workflows", config.workflow.kind)).observes:
        found = f"workflow.kind {config.workflow.kind!r} has one turn, so nothing is observed"
        yield Problem(where, asked, found, "use a workflow of several turns, or leave the key out")


def _check_held_out(config: RunConfig, name: str) -> Iterator[Problem]:
    if name not in config.tasks:
        yield Problem("evaluation.held_out", f"the taskset {name!r}", "no such taskset", suggest(name, config.tasks))
    if capabilities_of(resolve("buffers", config.buffer.kind)).explored:
        yield Problem(
            "evaluation.held_out",
            f"the loss over {name!r} with buffer.kind {config.buffer.kind!r}",
            "this stage learns from rollouts, not from rows",
            "use evaluation.taskset; or set held_out in the stage that has buffer.kind files",
        )


@CONFIG_RULES.rule
def check_rewards(config: RunConfig) -> Iterator[Problem]:
    """Nothing gives rewards: the workflow class declares `gives_rewards=False`, and there are no reward functions. An
    algorithm may need no rewards; an evaluation always needs them."""
    scored_later = capabilities_of(resolve("sample_strategies", config.buffer.strategy.kind)).judges
    workflow = capabilities_of(resolve("workflows", config.workflow.kind))
    if config.rewards or scored_later or workflow.gives_rewards:
        return
    explored = capabilities_of(resolve("buffers", config.buffer.kind)).explored
    rolled_out = explored and config.algorithm.reads_rewards and not _served(config)
    if rolled_out or config.evaluation.taskset is not None:
        yield Problem(
            "rewards",
            f"rewards of {'rollouts' if rolled_out else 'the evaluation'}",
            f"none, and the workflow {config.workflow.kind!r} returns none",
            "name a reward, for example rewards: [exact]",
        )


def _served(config: RunConfig) -> bool:
    """Whether agents bring the tasks and the rewards."""
    return config.run.mode in ("serve", "tinker") or ("train" in config.tasks and config.tasks["train"].kind == SERVED)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@CONFIG_RULES.rule
def check_serving(config: RunConfig) -> Iterator[Problem]:
    """A run serves agents, which bring their own tasks over HTTP at any time, with settings that do not fit that."""
    mode, explored = config.run.mode, capabilities_of(resolve("buffers", config.buffer.kind)).explored
    for name, tasks in config.tasks.items():
        if tasks.kind == SERVED and (name != "train" or not explored or mode in ("both", "explore")):
            yield Problem(
                f"tasks.{name}",
                f"{SERVED!r} tasks: their tasks come from agents",
                f"run.mode {mode!r} rolls out or reads tasks itself",
                "use it for `train` alone, with run.mode: serve (and `train` over a shared buffer), or name tasks",
            )
    evaluated = config.evaluation.taskset
    if evaluated is not None and evaluated in config.tasks and config.tasks[evaluated].kind == SERVED:
        yield Problem(
            "evaluation.taskset",
            f"an evaluation on {evaluated!r}",
            "it has no tasks: agents bring them",
            "name a taskset with tasks",
        )
    serve = config.serve
    if mode not in ("serve", "tinker"):
        if serve.linger_s:
            yield Problem("serve.linger_s", f"{serve.linger_s} s", f"run.mode {mode!r} serves nothing", "leave it out")
        return
    if serve.linger_s > config.sync.deadline_s:
        yield Problem(
            "serve.linger_s",
            f"{serve.linger_s:g} s",
            f"no wait may exceed sync.deadline_s ({config.sync.deadline_s:g} s)",
            "raise sync.deadline_s as well",
        )
    if serve.key_variable is None and not is_loopback(serve.host):
        yield Problem(
            "serve.key_variable",
            f"serve.host {serve.host!r} without a key",
            "any machine that reaches it could train the policy, or send feedback for rollouts of others",
            "name an environment variable that holds a key, or listen on 127.0.0.1",
        )
    if mode == "tinker" and not capabilities_of(describe("engines", config.engine.kind)).adopts_adapters:
        found, do = "it samples with other weights than those of a client's adapter", "use engine.kind torch or vllm"
        yield Problem("engine.kind", f"{config.engine.kind!r} with run.mode tinker", found, do)
    if config.schedule.deterministic:
        yield Problem(
            "schedule.deterministic",
            "a deterministic run that serves agents",
            "agents decide the order of tasks, not the run's seeds",
            "leave it out; max_staleness: 0 still trains groups in the order in which they began",
        )
    if config.cluster.kind != "local":
        yield Problem(
            "cluster.kind",
            f"run.mode {mode} on {config.cluster.kind}",
            "the endpoint lives in the command's process",
            "use cluster.kind: local; any number of serve commands may share a buffer",
        )


@CONFIG_RULES.rule
def check_cluster(config: RunConfig) -> Iterator[Problem]:
    """Names or numbers of roles do not fit the cluster: Ray starts both halves, one process has one of each role."""
    cluster, mode = config.cluster, config.run.mode
    if config.run.explorer == TRAINER:
        yield Problem(
            "run.explorer", f"an explorer named {TRAINER!r}", "that is the trainer's name", "choose another one"
        )
    if cluster.kind == "ray" and mode in ("explore", "train"):
        yield Problem(
            "run.mode",
            f"{mode!r} on Ray",
            "on a cluster one command starts explorers and trainer",
            "use run.mode: both, or cluster.kind: local for commands that share a buffer",
        )
    for name in ("address", "explorers", "engines", "ranks"):
        if cluster.kind == "local" and getattr(cluster, name) != type(cluster).model_fields[name].default:
            yield Problem(
                f"cluster.{name}",
                f"cluster.{name} without a cluster",
                "all roles are one process, one of each",
                "set cluster.kind to ray, or leave the key out",
            )
    if cluster.kind == "ray" and config.run.explorer:
        yield Problem(
            "run.explorer",
            f"an explorer named {config.run.explorer!r}",
            "on Ray they are named explorer-0, -1, ...",
            "leave the key out",
        )


@CONFIG_RULES.rule
def check_sections(config: RunConfig) -> Iterator[Problem]:
    """A section does not fit the others, by its own account."""
    for where, section in sections_of(config):
        yield from section.problems(config, where)


def sections_of(config: RunConfig) -> Iterator[tuple[str, Config]]:
    """(path in the config, section), lists and mappings of sections included."""
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, Config):
            yield name, value
        elif is_mapping(value):
            yield from ((f"{name}.{key}", v) for key, v in value.items() if isinstance(v, Config))
        elif isinstance(value, tuple):
            yield from ((f"{name}[{i}]", v) for i, v in enumerate(value) if isinstance(v, Config))  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
