"""What the user says: one frozen RunConfig from YAML, every problem reported at once.

Language: `extends: base.yaml` and `a.b=c`. A plugin section names its class by `kind`; that class owns the section's
fields. The string under a field is its help. `free()` marks a field that a resumed run may change.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeGuard, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SerializeAsAny, ValidationError

from trivium.checks import CHECKS, SETTLED
from trivium.errors import ConfigError, Problem, TriviumError, UnknownName
from trivium.registry import CATALOGUE, resolve, suggest
from trivium.save_monitor import SaveStrategy
from trivium.synchronizer import SyncStyle
from trivium.types import Sampling

_BASE: ContextVar[Path | None] = ContextVar("config_base", default=None)
"""The folder that relative paths of the config being validated start from."""


def is_mapping(value: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping)


def free(default: Any = ..., **constraints: Any) -> Any:
    """A field that a resumed run may change: length, cadence, monitors, threads, micro-batch budget."""
    return Field(default, json_schema_extra={"resume": "free"}, **constraints)


def config_path(path: str) -> Path:
    """A path the config mentions, seen from the config's own folder."""
    return ((_BASE.get() or Path.cwd()) / Path(path).expanduser()).resolve()


ConfigPath = Annotated[str, AfterValidator(lambda path: str(config_path(path)))]
"""A field that holds a path: relative to the config file when read, absolute from then on."""


def plugin_path(name: str) -> str:
    """A name that leads to a class or function, with the file of `file.py:Name` seen from the config's own folder."""
    file_name, is_file, attribute = name.rpartition(".py:")
    return f"{config_path(file_name + '.py')}:{attribute}" if is_file else name


def _with_module(name: str) -> str:
    if ":" not in name:
        raise ValueError("expected `package.module:Name` or `file.py:Name`")
    return plugin_path(name)


PluginPath = Annotated[str, AfterValidator(_with_module)]
"""A field that names a user's class or function: `package.module:Name`, or `file.py:Name` beside the config file."""


class Config(BaseModel):
    """Base of every section: frozen, no unknown keys, field docstrings are the help."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True,
        allow_inf_nan=False, protected_namespaces=(),
    )  # fmt: skip

    def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        """What is wrong with this section in the company of the others."""
        yield from ()


class Plugin(Config):
    """Base of a section whose class is picked by `kind`."""

    kind: str
    """Short name, `package.module:Name`, or `file.py:Name` relative to the config file."""

    @property
    def short_name(self) -> str:
        """The kind's last part: what its things are called in metrics."""
        return self.kind.rpartition(":")[2].rpartition(".")[2]


class _Nested(ValueError):
    """Carries an error of ours, or a section's own errors, through pydantic's collection of errors."""

    def __init__(self, error: TriviumError | ValidationError, owner: type[BaseModel] | None = None) -> None:
        super().__init__(str(error))
        self.error, self.owner = error, owner


def plugin(room: str, base: type[Plugin] = Plugin, default_kind: str | None = None) -> Callable[[Any], Any]:
    """A validator that turns `{kind: ..., ...}` into the Config of the class behind `kind`.

    The class (or value) may offer `configure(data) -> Config`, or own a `Config`; a plain function owns none and gets
    `base`.
    """

    def validate(data: Any) -> Any:
        if isinstance(data, Plugin):
            return data
        if isinstance(data, str):
            data = {"kind": data}
        if not is_mapping(data):
            raise ValueError(f"expected a mapping with `kind`, found {type(data).__name__}")
        said: dict[str, Any] = dict(data)
        kind = said.setdefault("kind", default_kind)
        if not isinstance(kind, str):
            raise _Nested(UnknownName("a section with `kind`", "no kind", suggest("", CATALOGUE[room])))
        said["kind"] = kind = plugin_path(kind)
        target = _resolved(room, kind)
        owner = getattr(target, "Config", base)
        try:
            if hasattr(target, "configure"):
                return target.configure(said)
            return owner.model_validate(said)
        except (TriviumError, ValidationError) as error:
            raise _Nested(error, owner) from error

    return validate


def _resolved(room: str, kind: str) -> Any:
    """The object behind a section's kind. What a user's module raises while it is imported says nothing about the
    section: it passes through, as an ImportError where pydantic would take it for a bad value."""
    try:
        return resolve(room, kind)
    except TriviumError as error:
        raise _Nested(error) from error
    except (ValueError, AssertionError) as error:
        raise ImportError(f"importing {kind} raised {type(error).__name__}: {error}") from error


def build(room: str, config: Plugin, **context: Any) -> Any:
    """The object that a plugin section describes: `Target(config, **context)`, or the plain function itself."""
    target = resolve(room, config.kind)
    return target(config, **context) if isinstance(target, type) else target


# --------------------------------------------------------------------------- sections


class RunSection(Config):
    """Which run this is."""

    dir: str = free("runs/run")
    """Run directory, relative to the working directory. A run that finds checkpoints there continues."""
    seed: int = 0
    """The seed of everything: weights, order, samples."""
    name: str = free("")
    """What separate commands call the run in a shared buffer; empty means the last part of `run.dir`."""
    mode: Literal["both", "explore", "train", "bench", "serve"] = free("both")
    """`both` explores and trains; `explore` and `train` do one of the two, in as many shells or machines as you like,
    over a buffer and a channel that they share; `serve` offers the policy to agents instead of exploring, and trains
    too unless the buffer is shared; `bench` evaluates every checkpoint of the run, in order."""
    explorer: str = free("", pattern=r"^[\w.-]*$")
    """Name of the explorer that this command starts; empty makes up one that nobody else has."""
    enable_preview: bool = free(False)
    """Whether monitors get a table of rollouts (best and worst of each step) whenever weights are published."""
    resume: bool = free(True)
    """Whether to continue what the run directory holds; false refuses a directory that holds a run."""


class StrategyConfig(Plugin):
    """Base of sample strategy sections: which groups a step is trained on."""

    kind: str = "default"

    def others(self, count: int) -> int:
        """Of a step's `count` groups, how many do not come from the explorers, but are replayed or an expert's."""
        del count
        return 0

    def oldest(self, max_staleness: int) -> int:
        """How many versions old a group may be when it is trained on, where the buffer holds none older than
        `max_staleness`."""
        return max_staleness


StrategyPlugin = Annotated[
    SerializeAsAny[StrategyConfig], BeforeValidator(plugin("sample_strategies", StrategyConfig, "default"))
]
OperatorPlugin = Annotated[SerializeAsAny[Plugin], BeforeValidator(plugin("operators"))]


class SamplingConfig(Config):
    """How replies are sampled."""

    max_new_tokens: int = Field(default=256, ge=1)
    """Longest reply, in tokens."""
    temperature: float = Field(default=1.0, ge=0)
    """Divides the logits; 0 is greedy (evaluation only)."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus truncation; changes the distribution, so training refuses it until it can be replayed."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k likeliest tokens; 0 keeps all. Refused in training like `top_p`."""
    min_new_tokens: int = Field(default=0, ge=0)
    """End of sequence is impossible before this many tokens. Refused in training like `top_p`."""
    stop: tuple[str, ...] = ()
    """Strings that end a turn."""

    def sampling(self) -> Sampling:
        """The same as a value that travels."""
        return Sampling(**self.model_dump())

    def changes_distribution(self) -> list[str]:
        """The settings that make the sampled distribution differ from softmax(logits / temperature)."""
        neutral = {"top_p": 1.0, "top_k": 0, "min_new_tokens": 0}
        return [name for name, value in neutral.items() if getattr(self, name) != value]


class EngineConfig(Plugin):
    """Base of engine sections."""

    kind: str = "torch"
    sampling: SamplingConfig = SamplingConfig()
    """How training rollouts are sampled."""


class WorkflowConfig(Plugin):
    """Base of workflow sections: how a task is played, and what happens when playing goes wrong."""

    kind: str = "single_turn"
    deadline_s: float = Field(default=600.0, gt=0)
    """A rollout (workflow and rewards together) that takes longer is recorded as failed."""
    max_failed_fraction: float = free(0.5, ge=0, le=1)
    """The run ends when more than this part of the trajectories of a step, or of an evaluation, failed."""
    max_concurrent: int = free(4096, ge=1)
    """Trajectories in flight at once."""
    max_retries: int = Field(default=0, ge=0)
    """How often a trajectory that its workflow failed is played again, from its first turn and with the same
    randomness, within the same deadline."""
    min_members: int = Field(default=1, ge=1)
    """A group of which fewer trajectories succeeded is dropped, and another one played for it. 1 drops none: a group
    that failed whole reaches the trainer, which counts it and leaves it out."""


class RewardConfig(Plugin):
    """Base of reward sections; a plain function has exactly these keys."""

    weight: float = 1.0
    """Factor of this component in the total."""
    name: str = ""
    """Name in metrics; empty means the kind's last part."""
    workers: int = free(0, ge=0)
    """Processes that it computes in; 0 uses threads of the explorer. A reward that hangs or holds the interpreter is
    killed there at the deadline of its rollout."""

    @property
    def label(self) -> str:
        return self.name or self.short_name


class TrainConfig(Plugin):
    """Base of train engine sections."""

    kind: str = "torch"


class AlgorithmConfig(Plugin):
    """Base of algorithm sections; presets own the rest."""

    kind: str = "grpo"

    @property
    def reads_rewards(self) -> bool:
        """Whether what is played must be judged."""
        return True

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained beside the policy."""
        return False

    def settled(self, run: RunConfig) -> AlgorithmConfig:
        """The section with what it leaves to the rest of the config filled in: what an algorithm is built from."""
        del run
        return self

    def describe(self, run: RunConfig) -> dict[str, str]:
        """What it is, and what of it follows from the rest of the config, for the plan."""
        del run
        return {"kind": self.kind}


class CurriculumConfig(Config):
    """Tasks by difficulty instead of at random. Every epoch still visits every task once."""

    column: str
    """The column that says how difficult a task is: a number, more being harder."""
    easy_first: bool = True
    """Whether an epoch begins with the easy ones; else with the hard ones."""
    spread: float = Field(default=0.2, ge=0)
    """How far the order is blurred, as a part of the taskset: 0 is strictly by difficulty (equals at random), 10 is
    nearly a shuffle."""


class ScheduleSection(Config):
    """How much is played and trained, in which order, how far apart."""

    steps: int = free(100, ge=1)
    """Train steps of this stage."""
    groups_per_step: int = Field(default=32, ge=1)
    """Groups that one train step consumes."""
    group_size: int = Field(default=8, ge=1)
    """Trajectories per task."""
    max_staleness: int | None = Field(default=None, ge=0)
    """How many versions old a group may be when it is trained on. Unsaid, it follows from `sync.offset`, else it is 0:
    the synchronous run."""
    deterministic: bool = False
    """Makes an asynchronous run a function of its seeds: which version plays a group no longer depends on timing."""
    shuffle: bool = True
    """Whether each epoch visits the tasks in its own order."""
    curriculum: CurriculumConfig | None = None
    """Orders each epoch by difficulty."""
    max_attempts: int = Field(default=3, ge=1)
    """How often a slot is played before its group is given up as too stale."""
    over_rollout: float = Field(default=0.0, ge=0)
    """Plays so much more than a step needs, as a part of `groups_per_step`; the step takes what is finished first, and
    what could only become too stale is called off and played again later. 0 waits for the slowest."""


class SyncSection(Config):
    """When and how weights reach the explorers."""

    method: str = "memory"
    """`memory` (one process, or Ray's object store), `checkpoint` (files in a directory that both sides see), `nccl`
    (a broadcast: nccl between GPUs, gloo between CPUs); further channels by name or path."""
    style: SyncStyle = SyncStyle.FIXED
    """Who decides when: `fixed` publishes every `interval` steps; `dynamic_by_trainer` asks the explorers after so many
    steps; `dynamic_by_explorer` publishes when an explorer asks, after so many steps' worth of groups or without a
    free slot."""
    interval: int = Field(default=1, ge=1)
    """Train steps between two publications."""
    offset: int | None = Field(default=None, ge=0)
    """Another way to say `max_staleness = interval - 1 + offset`."""
    in_flight: Literal["finish", "update"] = "finish"
    """What becomes of replies in progress when new weights arrive: `finish` ends them first; `update` goes on with the
    new weights from the next token, every token keeping the version that sampled it."""
    dir: ConfigPath | None = free(None)
    """Directory of the `checkpoint` method, for this run alone, that all its roles see; unset means `sync` in the run
    directory."""
    deadline_s: float = free(3600.0, gt=0)
    """Longest wait of one side for the other."""
    heartbeat_s: float = free(10.0, gt=0)
    """A role in another process that gave no sign of life for so long counts as dead."""


def is_sampled(buffer: Any) -> bool:
    """Whether a policy sampled the groups of a buffer (or of its class), with log-probabilities and rewards: explorers
    fill it, or it says that others did."""
    return getattr(buffer, "sampled", getattr(buffer, "explored", True))


class BufferConfig(Plugin):
    """Base of buffer sections."""

    kind: str = "memory"
    strategy: StrategyPlugin = Field(default={"kind": "default"})  # pyright: ignore[reportAssignmentType]
    """Which groups a step is trained on."""
    operators: tuple[OperatorPlugin, ...] = ()
    """The experience pipeline: what becomes of each finished group before it is stored, in order. Names, or functions
    of yours."""
    max_dropped_in_a_row: int = free(1000, ge=1)
    """The run ends when the operators dropped so many groups of one explorer, one after the other."""

    def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        yield from self.strategy.problems(run, f"{where}.strategy")
        for number, section in enumerate(self.operators):
            place, target = f"{where}.operators[{number}]", resolve("operators", section.kind)
            yield from section.problems(run, place)
            if not getattr(resolve("buffers", self.kind), "explored", True):
                yield Problem(
                    place, f"the operator {section.kind!r} on buffer.kind {self.kind!r}",
                    "operators work on what explorers play, and here nobody plays",
                    "leave it out, or change the rows themselves",
                )  # fmt: skip
            if run.slots_are_settled and getattr(target, "drops", True):
                yield Problem(
                    place, f"the operator {section.kind!r}, which may drop groups, {SETTLED}",
                    "which version plays a slot would depend on what is dropped before it",
                    "leave it out (one of yours that drops nothing says so: drops = False), or set "
                    "schedule.max_staleness or schedule.deterministic back",
                )  # fmt: skip


class EvaluationSection(Config):
    """Held-out tasks, played with fixed weights."""

    taskset: str | None = None
    """Which taskset to play; nothing evaluates nothing."""
    every: int = free(0, ge=0)
    """Train steps between evaluations; 0 evaluates at the start and the end of the last stage only."""
    samples: int = Field(default=1, ge=1)
    """Trajectories per task."""
    k: tuple[int, ...] = (1,)
    """The k of pass@k and maj@k; each at most `samples`."""
    sampling: SamplingConfig = SamplingConfig(temperature=0.0)
    """How evaluation samples; greedy by default."""
    threshold: float = 1.0
    """A total reward of at least this counts as right."""


class CheckpointSection(Config):
    """What is kept on disk."""

    save_every: int = free(50, ge=0)
    """Train steps between checkpoints; 0 saves at the end of each stage only."""
    keep: int = free(3, ge=1)
    """Newest checkpoints to keep."""
    keep_best: str | None = free(None)
    """A metric of the evaluation whose best checkpoint is kept as well, for example `eval/test/accuracy`."""
    asynchronous: bool = free(False)
    """Whether training goes on while a checkpoint is being written, from a copy in host memory: as much again as
    weights and optimizer take. The next save waits for it, and so does the end of a stage."""
    save_strategy: SaveStrategy = free(SaveStrategy.UNRESTRICTED)
    """Who may write at the same time: `single_thread`, `single_process`, `single_node`, `unrestricted`."""
    remote: str | None = free(None)
    """Where complete checkpoints are copied to as well: an fsspec URL (`s3://bucket/run`, `file:///mnt/run`)."""


class ClusterSection(Config):
    """Where the roles run and what they may use."""

    kind: Literal["local", "ray"] = free("local")
    """`local` keeps the roles of this command in its process; `ray` makes each an actor."""
    address: str | None = free(None)
    """A running Ray cluster (`auto`, `host:port`, `ray://...`); unset starts one on this machine for the run."""
    explorers: int = free(1, ge=1)
    """Explorer actors."""
    engines: int = free(1, ge=1)
    """Engine actors of each explorer; requests go to the least busy one."""
    ranks: int = free(1, ge=1)
    """Processes that train together: actors beside the trainer's, each with a GPU of its own, where it trains on GPUs,
    or all on one machine. Without Ray, `torchrun` starts as many."""
    max_restarts: int = free(2, ge=0)
    """How often explorers and engines that died are started again before their death ends the run."""
    threads: int = free(0, ge=0)
    """Threads for model work of each role; 0 takes every core. Results are bit-equal only at equal thread counts."""


class ServeSection(Config):
    """The endpoint of `run.mode: serve`."""

    host: str = free("127.0.0.1")
    """Address to listen on."""
    port: int = free(8010, ge=0, le=65535)
    """Port to listen on; 0 takes a free one, written to `serve.json` in the run directory."""
    model: str = free("policy")
    """The name clients ask for."""
    key_variable: str | None = free(None)
    """Environment variable with the key that clients must present; unset admits everybody who reaches the port."""
    idle_s: float = free(3600.0, gt=0)
    """A conversation without feedback for so long is forgotten, and counted as dropped."""


_RunConfigT = TypeVar("_RunConfigT", bound="RunConfig")
Model = Annotated[SerializeAsAny[Plugin], BeforeValidator(plugin("models", default_kind="hf"))]
Tasks = Annotated[SerializeAsAny[Plugin], BeforeValidator(plugin("tasks"))]
WorkflowPlugin = Annotated[
    SerializeAsAny[WorkflowConfig], BeforeValidator(plugin("workflows", WorkflowConfig, "single_turn"))
]
RewardPlugin = Annotated[SerializeAsAny[RewardConfig], BeforeValidator(plugin("rewards", RewardConfig))]
Engine = Annotated[SerializeAsAny[EngineConfig], BeforeValidator(plugin("engines", EngineConfig, "torch"))]
AlgorithmPlugin = Annotated[
    SerializeAsAny[AlgorithmConfig], BeforeValidator(plugin("algorithms", AlgorithmConfig, "grpo"))
]
Train = Annotated[SerializeAsAny[TrainConfig], BeforeValidator(plugin("train", TrainConfig, "torch"))]
BufferPlugin = Annotated[SerializeAsAny[BufferConfig], BeforeValidator(plugin("buffers", BufferConfig, "memory"))]
MonitorPlugin = Annotated[SerializeAsAny[Plugin], BeforeValidator(plugin("monitors"))]


class RunConfig(Config):
    """Everything a run depends on."""

    run: RunSection = RunSection()
    model: Model
    """The policy: `{kind: hf, path: ...}` or `{kind: tiny, ...}`."""
    tasks: dict[str, Tasks]
    """Tasksets by name; `train` is what the explorer plays."""
    workflow: WorkflowPlugin = Field(default={"kind": "single_turn"})  # pyright: ignore[reportAssignmentType]
    rewards: tuple[RewardPlugin, ...] = ()
    """Judges of a finished trajectory; their weighted sum is the reward."""
    engine: Engine = Field(default={"kind": "torch"})  # pyright: ignore[reportAssignmentType]
    algorithm: AlgorithmPlugin = Field(default={"kind": "grpo"})  # pyright: ignore[reportAssignmentType]
    train: Train = Field(default={"kind": "torch"})  # pyright: ignore[reportAssignmentType]
    schedule: ScheduleSection = ScheduleSection()
    sync: SyncSection = SyncSection()
    buffer: BufferPlugin = Field(default={"kind": "memory"})  # pyright: ignore[reportAssignmentType]
    evaluation: EvaluationSection = EvaluationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    monitors: tuple[MonitorPlugin, ...] = free(({"kind": "console"}, {"kind": "jsonl"}))
    """Where metrics go."""
    cluster: ClusterSection = ClusterSection()
    serve: ServeSection = ServeSection()
    stages: tuple[dict[str, Any], ...] = ()
    """Ordered overrides of this config, each with its own `schedule.steps`; one global step runs across them."""

    def stage_configs(self) -> tuple[RunConfig, ...]:
        """One config per stage, without `stages`; the config itself where there are none."""
        base = self.model_dump(exclude={"stages"}, exclude_unset=True)
        if not self.stages:
            return (self,)
        return tuple(type(self).model_validate(merged(base, stage)) for stage in self.stages)

    @property
    def max_staleness(self) -> int:
        """`schedule.max_staleness`, or what `sync.offset` says, or 0."""
        if self.sync.offset is not None:
            return self.sync.interval - 1 + self.sync.offset
        return self.schedule.max_staleness or 0

    @property
    def max_age(self) -> int:
        """How many versions old a group may be when it is trained on: `max_staleness`, unless the sample strategy is
        stricter or replays older ones."""
        return self.buffer.strategy.oldest(self.max_staleness)

    @property
    def slots_are_settled(self) -> bool:
        """Whether it is settled beforehand which version plays a slot: then no group may be replaced by another."""
        return self.schedule.deterministic and self.max_staleness > 0

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any], base: Path | None = None) -> Self:
        """A validated config; raises ConfigError with every problem. `base` is where relative paths start."""
        token = _BASE.set(base)
        try:
            found, problems = _validate(cls, data)
        finally:
            _BASE.reset(token)
        if problems or found is None:
            later = "" if found is not None else " (further checks follow once these are mended)"
            raise ConfigError(
                "a valid config", f"{len(problems)} problem(s)", f"mend them all at once{later}:", problems
            )
        return found

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> Self:
        """The config in a YAML file, with `a.b=c` overrides applied."""
        data = read_yaml(Path(path))
        for override in overrides:
            data = merged(data, parse_override(override))
        return cls.from_mapping(data, Path(path).resolve().parent)


# --------------------------------------------------------------------------- reading


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `change` laid over it, mapping by mapping; a section whose `kind` changes starts afresh.

    A section that did not say its kind keeps its keys: those that the new kind does not know are reported, not dropped.
    """
    result = copy.deepcopy(dict(base))
    for key, value in change.items():
        old = result.get(key)
        if is_mapping(value) and is_mapping(old):
            new_kind = "kind" in value and "kind" in old and value["kind"] != old["kind"]
            result[key] = copy.deepcopy(dict(value)) if new_kind else merged(old, value)
        else:
            result[key] = copy.deepcopy(value)
    return result


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a key said twice is an error: the first value would silently have no effect."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge" and names.count(key.value) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is said twice", key.start_mark
                )
        return super().construct_mapping(node, deep)


def read_yaml(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A YAML mapping with its `extends` followed."""
    path = path.resolve()
    if path in seen:
        raise ConfigError(f"read {path.name}", "it extends itself", "break the circle of `extends`")
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except FileNotFoundError as error:
        raise ConfigError(f"read the config {path}", "no such file", "check the path") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"read the config {path}", f"not valid YAML: {error}", "mend the file") from error
    if not is_mapping(data):
        raise ConfigError(f"read the config {path}", "not a mapping", "start with `model:`, `tasks:`, ...")
    said = dict(data)
    parent = said.pop("extends", None)
    return said if parent is None else merged(read_yaml(path.parent / parent, (*seen, path)), said)


def parse_override(text: str) -> dict[str, Any]:
    """`a.b=c` as a nested mapping; the value is read as YAML."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise ConfigError(f"override {text!r}", "no `=`", "write section.field=value")
    try:
        nested: Any = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {text!r}", f"the value is not YAML: {error}", "quote it for the shell") from error
    for part in reversed(key.split(".")):
        nested = {part: nested}
    return nested


def _validate(cls: type[_RunConfigT], data: Mapping[str, Any]) -> tuple[_RunConfigT | None, list[Problem]]:
    """The config, or everything that is wrong with it.

    Stages are validated in full now, not when their turn comes, and their relative paths made absolute like all others.
    """
    try:
        config = cls.model_validate(data)
    except ValidationError as error:
        return None, list(flatten(error, cls, ""))
    problems: list[Problem] = []
    base = config.model_dump(exclude={"stages"}, exclude_unset=True)
    resolved: list[dict[str, Any]] = []
    for number, stage in enumerate(config.stages):
        problems += [
            Problem(
                f"stages[{number}].{name}", f"{name!r} of one stage", "all stages share it", "say it outside `stages`"
            )
            for name in sorted({"run", "model", "stages"} & set(stage))
        ]
        try:
            staged = cls.model_validate(merged(base, stage))
        except ValidationError as error:
            problems += flatten(error, cls, f"stages[{number}]")
            continue
        problems += check(staged, f"stages[{number}].")
        said = staged.model_dump(mode="json", exclude_unset=True)
        resolved.append({name: said[name] for name in stage})
    if not config.stages:
        problems += check(config)
    return config.model_copy(update={"stages": tuple(resolved)}), problems


def flatten(error: ValidationError, owner: type[BaseModel], prefix: str) -> Iterator[Problem]:
    """Pydantic's errors as problems, nested sections included, with the nearest valid name for unknown keys."""
    for item in error.errors(include_url=False):
        where = _dotted(prefix, item["loc"])
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, _Nested) and isinstance(cause.error, ValidationError):
            yield from flatten(cause.error, cause.owner or owner, where)
        elif isinstance(cause, _Nested) and isinstance(cause.error, TriviumError):
            yield Problem(where, cause.error.asked, cause.error.found, cause.error.do)
        elif item["type"] == "extra_forbidden":
            section = _section_at(owner, item["loc"][:-1])
            known = section.model_fields if section is not None else {}
            yield Problem(
                where, f"the key {item['loc'][-1]!r}", "no such key here", suggest(str(item["loc"][-1]), known)
            )
        elif item["type"] == "missing":
            yield Problem(where, "a value", "nothing", f"say {where}: ...")
        else:
            found = repr(item["input"])
            yield Problem(where, item["msg"], found if len(found) < 80 else found[:77] + "...", "correct the value")


def _dotted(prefix: str, loc: Sequence[int | str]) -> str:
    path = prefix
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path


def _section_at(owner: type[BaseModel], loc: Sequence[int | str]) -> type[BaseModel] | None:
    """The section class that a location points into."""
    section: type[BaseModel] | None = owner
    for part in loc:
        field = section.model_fields.get(str(part)) if section is not None else None
        annotation = field.annotation if field is not None else None
        section = annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
    return section


# --------------------------------------------------------------------------- checking


def check(config: RunConfig, prefix: str = "") -> list[Problem]:
    """Everything about the sections' company that cannot work; empty when the config can run."""
    problems = [problem for look in CHECKS for problem in look(config)]
    for where, section in _sections(config):
        problems += section.problems(config, where)
    return [Problem(prefix + p[0], p[1], p[2], p[3]) for p in problems]


def _sections(config: RunConfig) -> Iterator[tuple[str, Config]]:
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, Config):
            yield name, value
        elif is_mapping(value):
            yield from ((f"{name}.{key}", v) for key, v in value.items() if isinstance(v, Config))
        elif isinstance(value, tuple):
            yield from ((f"{name}[{i}]", v) for i, v in enumerate(value) if isinstance(v, Config))  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def usable_cores() -> int:
    """The cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
