"""The batch arithmetic and the memory of a stage, estimated from config and config.json alone, and whether the machine
has that memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from trivium.config.recording import replays_routing, shape_in
from trivium.foundation.errors import ConfigError, Problem
from trivium.foundation.registry import describe, resolve
from trivium.planning.choices import MAX_ROWS, MIB, MICRO_BATCH_TOKENS, micro_batch_tokens
from trivium.planning.machine import Machine
from trivium.planning.model_memory import Adapter, SplitModels, TrainedModels, engine_memory, memory_plan
from trivium.planning.model_shape import BYTES, FEW_BITS, ModelShape
from trivium.planning.parallel import ParallelConfig, sent_in_a_pass
from trivium.types import SyncMethod, capabilities_of

if TYPE_CHECKING:
    from trivium.config.schema import RunConfig

PROMPT_TOKENS = 1024
"""Assumed length of a prompt that is not known, if the model's context has room for it beside `max_new_tokens`. For a
model that reads images, all tokens of a prompt are assumed to stand for them."""
FILLED = 0.75
"""The part of a memory that a run fills at most by the limits that Trivium chooses. The rest is for the system, its
file cache and what a plan does not know."""
MIN_ROWS = 8
"""The smallest `engine.max_rows` that Trivium chooses."""
RUNTIME = 512 * MIB
"""Bytes of a process with torch that holds no model yet."""
VERSIONS_IN_FILES = 3
"""The versions of weights that memory must have room for if an engine writes them to files there: the one it holds, the
next, and room to spare."""
_TURNS = (("activations", "gradients"), ("engine prompts", "engine pass"))
"""The items, by the ends of their names, that exist only during an update, and only during a rollout."""
_ROLE_OF = {
    "ref": "reference",
    "teacher": "teacher",
    "teacher_top": "teacher",
    "student_top": "teacher",
    "values": "critic",
}
_FEWER_WEIGHTS = "train.lora, train.frozen_dtype: bfloat16, more ranks, train.cpu_offload on GPUs, or a smaller model"
_KNOBS = {
    "activations": "lower train.max_tokens_per_micro_batch, set train.gradient_checkpointing, or train adapters in the "
    "last layers only (train.lora.layers)",
    "optimizer": f"use {_FEWER_WEIGHTS}",
    "gradients": f"use {_FEWER_WEIGHTS}",
    "weights": f"use {_FEWER_WEIGHTS}",
    "head": "set train.frozen_dtype: float32, or use a model with a smaller vocabulary",
    "dequantized": "use a smaller model: its widest matrix is held in bfloat16 during a computation",
    "gathered": "use a smaller model: the largest layer and the head are whole on each rank while they compute",
    "cache": "lower engine.max_rows, engine.max_context or engine.sampling.max_new_tokens",
    "states": "lower engine.max_rows: each row has recurrent states, whatever its length",
    "reserved": "lower engine.gpu_memory_utilization or engine.cache_gib",
    "prompts": "lower engine.prefill_tokens",
    "pass": "lower engine.prefill_tokens or engine.max_rows",
    "engine": "set engine.dtype: bfloat16, give engines a GPU of their own (cluster.kind: ray), or use a smaller model",
    "loading": "use fewer ranks on this machine",
    "routing": "lower schedule.groups_per_step or schedule.max_staleness, or set train.router_replay: off",
    "versions": "set sync.method: checkpoint, or lower schedule.max_staleness",
    "received": "use fewer ranks on this machine, or set engine.dtype: bfloat16",
    "copy": "set checkpoint.asynchronous: false",
    "runtime": "use fewer processes on this machine",
    "vLLM": "use fewer engines on this machine, or set engine.dtype: bfloat16 or train.lora.push: adapter",
}
"""What to change about an item, by the last word of its name."""


@dataclass(frozen=True)
class Lengths:
    """The lengths of texts of a stage, in tokens of its model."""

    longest: int
    typical: int
    """The median."""
    source: str
    """How many texts were read, or why they were not."""


@dataclass(frozen=True)
class TaskTokens:
    """What a stage reads, as far as it can be known before a run."""

    prompts: Lengths = Lengths(PROMPT_TOKENS, PROMPT_TOKENS, "assumed: no prompt was read")
    """The prompts of rollouts."""
    rows: Lengths | None = None
    """The whole sequences of a stage that learns from rows; None for one that learns from rollouts."""
    evaluated: int = 0
    """The rollouts of one evaluation; 0 if there is none, or if their number is unknown."""
    left_out: Mapping[str, int] = field(default_factory=dict[str, int])
    """The rows that are skipped, dropped or cut, by taskset and reason."""


_UNREAD = TaskTokens()


@dataclass(frozen=True)
class BatchPlan:
    """What one train step is cut into. All sequences are assumed to have their full length: the numbers are bounds."""

    prompts: int
    group_size: int
    sequences: int
    """Prompts times group size."""
    mini_batches: int
    """Optimizer steps of one pass over the batch."""
    epochs: int
    """Passes over the batch."""
    ranks: int
    data_ranks: int
    """Groups of ranks that hold different sequences (`train.sequence_parallel`, `train.parallel.tensor`)."""
    tasks: TaskTokens
    sequence_ranks: int
    """The ranks of a group that share each sequence; others split its layers."""
    sequences_per_data_rank: int
    """At most, in one mini-batch."""
    tokens_per_sequence: int
    """Prompt and completion: the longest that is expected, or the model's context."""
    tokens_per_micro_batch: int | None
    """The budget of one pass on one rank; None if the train engine has none."""
    micro_batches: int | None
    """At most, in one mini-batch on one data rank."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by item."""

    device: str
    """The type of device of training ranks: `cpu` or `cuda`."""
    rank: Mapping[str, int]
    """Those on the device of one training rank."""
    rank_host: Mapping[str, int]
    """Those in host memory for one training rank on a GPU."""
    engine: Mapping[str, int]
    """Those on the device of one rollout engine."""
    engine_device: str
    processes: int
    """Training ranks."""
    engines: int
    together: bool
    """Whether the first rank and the engine are one process."""
    takes_turns: bool = False
    """Whether the engine computes only while the rank waits, in one process: what one frees, the other takes."""
    sleeps: bool = False
    """Whether the engine frees their GPU while the rank updates."""
    recorded: Mapping[str, int] = field(default_factory=dict[str, int])
    """Those in host memory of rollouts that wait or are trained on."""
    engine_host: Mapping[str, int] = field(default_factory=dict[str, int])
    """Those in host memory for one rollout engine, in addition to those on its device."""

    @property
    def host(self) -> dict[str, int]:
        """All items in host memory, if every role runs on this machine."""
        ranks = self.rank if self.device == "cpu" else self.rank_host
        items = {name: number * self.processes for name, number in ranks.items()}
        if self.engine_device == "cpu":
            items |= {name: number * self.engines for name, number in self.engine.items()}
        items |= {name: number * self.engines for name, number in self.engine_host.items()}
        if (
            self.takes_turns
            and self.together
            and self.rank
            and self.engine
            and self.device == self.engine_device == "cpu"
        ):
            turns = [{name for name in items if name.endswith(ends)} for ends in _TURNS]
            for name in min(turns, key=lambda names: sum(items[name] for name in names)):
                del items[name]
        apart = self.engines if self.engine and not (self.together and self.processes) else 0
        return {**items, **self.recorded, "runtime": RUNTIME * (self.processes + apart)}

    @property
    def gpu(self) -> dict[str, int]:
        """The items on the fullest GPU: a rank's or an engine's, or both if the two share a process."""
        rank = dict(self.rank) if self.device == "cuda" else {}
        engine = dict(self.engine) if self.engine_device == "cuda" else {}
        idle = {name: n for name, n in rank.items() if name.endswith(("weights", "optimizer"))} if self.sleeps else rank
        both = [idle | engine] if self.together else [engine]
        items = max(rank, *both, key=lambda items: sum(items.values()))
        return items and {**items, "runtime": RUNTIME}

    def summary(self, machine: Machine) -> dict[str, Any]:
        """The printed plan: MiB by item, the sums that are needed, and what is available."""
        items: dict[str, Any] = {"each rank": _mib(self.rank) | {"device": self.device, "ranks": self.processes}}
        if self.rank_host and self.device != "cpu":
            items["each rank, host"] = _mib(self.rank_host)
        if self.engine:
            items["each engine"] = _mib(self.engine) | {"device": self.engine_device, "engines": self.engines}
        if self.engine_host:
            items["each engine, host"] = _mib(self.engine_host)
        if self.recorded:
            items["rollouts, host"] = _mib(self.recorded)
        needed: dict[str, Any] = {"host": round(sum(self.host.values()) / MIB)}
        available: dict[str, Any] = {"host": round(machine.memory / MIB) if machine.memory else "unknown"}
        if self.gpu:
            needed["gpu"] = round(sum(self.gpu.values()) / MIB)
            available["gpus"] = [round(gpu / MIB) for gpu in machine.gpus]
        return {"unit": "MiB", **items, "needed": needed, "available": available}


def _mib(items: Mapping[str, int]) -> dict[str, Any]:
    sizes: dict[str, Any] = {name: round(number / MIB, 1) for name, number in items.items() if number}
    return {**sizes, "total": round(sum(items.values()) / MIB, 1)}


def plan_stage(
    config: RunConfig, ranks: int, machine: Machine, tasks: TaskTokens = _UNREAD, *, is_last: bool = True
) -> tuple[RunConfig, BatchPlan, MemoryPlan | None]:
    """A stage with the limits that its config leaves out, the cut of a train step, and the memory.

    The limits are the largest that pay, if the plan then leaves a part of each memory free (`FILLED`). Else those of
    the item that takes more memory, activations or cache, are halved until it does; but a micro-batch holds the longest
    sequence. They depend on the config, the tasks and the size of the machine alone.
    """
    shape, tokens, rows = shape_in(config), MICRO_BATCH_TOKENS, MAX_ROWS
    if shape is not None and config.cluster.address is None:
        device, dtype = planned(getattr(config.train, "device", "cpu"), getattr(config.train, "dtype", "auto"), machine)
        adapter = getattr(config.train, "lora", None) is not None
        tokens = micro_batch_tokens(shape.parameters * BYTES[dtype], device, adapter=adapter)
    longest = _longest_part(plan_batch(config, ranks, tasks))
    tokens = max(tokens, longest)
    while True:
        stage = with_limits(config, tokens, rows)
        batch = plan_batch(stage, ranks, tasks)
        memory = plan_memory(stage, batch, machine, is_last=is_last)
        if memory is None or not _exceeded(memory, machine, FILLED):
            return stage, batch, memory
        items = {**memory.rank, **memory.engine}
        cuttable = ["activations"] * (tokens > longest and stage.train is not config.train)
        cuttable += ["engine cache"] * (rows > MIN_ROWS and stage.engine is not config.engine)
        if not cuttable:
            return stage, batch, memory
        if max(cuttable, key=lambda name: items.get(name, 0)) == "activations":
            tokens = max(longest, tokens // 2)
        else:
            rows //= 2


def with_limits(config: RunConfig, tokens: int | None, rows: int | None) -> RunConfig:
    """The config with `train.max_tokens_per_micro_batch` and `engine.max_rows`, where they are unset."""
    update: dict[str, object] = {}
    for name, key, value in (("train", "max_tokens_per_micro_batch", tokens), ("engine", "max_rows", rows)):
        section = getattr(config, name)
        if getattr(section, key, 0) is None:
            update[name] = section.model_copy(update={key: value})
    return config.model_copy(update=update) if update else config


def plan_batch(config: RunConfig, ranks: int, tasks: TaskTokens = _UNREAD) -> BatchPlan:
    """How one train step of a stage is cut on `ranks` training ranks."""
    schedule, train = config.schedule, config.train
    algorithm, sequences = config.algorithm, trajectories_per_step(config)
    mini_batches = min(int(getattr(algorithm, "mini_batches", 1)), schedule.groups_per_step)
    sequence, tensor = int(getattr(train, "sequence_parallel", 1)), split_over(config).tensor
    data_ranks = max(1, ranks // sequence // tensor)
    sequence = max(1, ranks // data_ranks // tensor)
    share = -(-sequences // mini_batches // data_ranks)
    tokens = rollout_tokens(config, tasks.prompts) if tasks.rows is None else tasks.rows.longest
    budget: int | None = getattr(train, "max_tokens_per_micro_batch", None)
    micro_batches = None
    if budget is not None:
        together = max(1, budget * sequence // tokens)
        micro_batches = -(-share // together)
    return BatchPlan(
        schedule.groups_per_step,
        schedule.group_size,
        sequences,
        mini_batches,
        int(getattr(algorithm, "epochs", 1)),
        ranks,
        data_ranks,
        tasks,
        sequence,
        share,
        tokens,
        budget,
        micro_batches,
    )


def trajectories_per_step(config: RunConfig, stored: int = 0) -> int:
    """The trajectories of a train step, without those of `stored` groups."""
    return (config.schedule.groups_per_step - stored) * config.schedule.group_size


def split_over(config: RunConfig) -> ParallelConfig:
    """The ranks that split the layers of a stage's models."""
    return getattr(config.train, "parallel", ParallelConfig())


def rollout_tokens(config: RunConfig, prompts: Lengths) -> int:
    """The length of the longest rollout that is expected."""
    shape = shape_in(config)
    limits = [getattr(config.engine, "max_context", None), shape.max_positions if shape is not None else None]
    return min([config.engine.sampling.max_new_tokens + prompts.longest, *(int(limit) for limit in limits if limit)])


def is_explored(config: RunConfig) -> bool:
    """Whether a stage learns from rollouts of its policy."""
    return capabilities_of(describe("buffers", config.buffer.kind)).explored


def is_evaluated(config: RunConfig, *, is_last: bool) -> bool:
    """Whether a stage evaluates its policy; only the last one does if `evaluation.every` is 0."""
    return config.evaluation.taskset is not None and (is_last or config.evaluation.every > 0)


def kept_versions(config: RunConfig) -> int:
    """The number of newest versions that stay available. Explorers of a resumed run may need each since the oldest with
    which a pending slot is sampled."""
    return config.max_staleness // config.sync.interval + 2


def context_limit(config: RunConfig) -> int | None:
    """The largest number of tokens of prompt and completion together; None if the engine's section does not say."""
    if not hasattr(config.engine, "max_context"):
        return None
    shape = shape_in(config)
    return getattr(config.engine, "max_context", None) or (None if shape is None else shape.max_positions)


def vision_in(config: RunConfig) -> str | None:
    """The parts of a stage's vision-language model, with their sizes and whether they are trained; None for a model
    that reads text only, or of unknown size."""
    shape = shape_in(config)
    if shape is None or shape.vision is None:
        return None
    vision, adapted = shape.vision, getattr(config.train, "lora", None) is not None
    which = getattr(config.train, "vision_tower", None) or ("frozen" if adapted else "trained")
    states = {
        "tower": (vision.tower, which == "trained"),
        "projector": (vision.projector, which != "frozen"),
        "language part": (shape.parameters - vision.parameters, not adapted),
    }
    parts = [
        f"{part} of {number:,} parameters {'trained' if trained else 'frozen'}"
        for part, (number, trained) in states.items()
    ]
    return f"{shape.kind}: {', '.join([*parts, *['an adapter trained'] * adapted])}"


def vision_problems(run: RunConfig, which: str | None, where: str, *, adapted: bool) -> Iterator[Problem]:
    """What is wrong with `train.vision_tower`."""
    shape = shape_in(run)
    if which in ("trained", "projector") and shape is not None and shape.vision is None:
        yield Problem(where, f"{which!r}", "the model reads text only", "leave the key out")
    if adapted and which in ("trained", "projector"):
        found = "with train.lora the adapter is all that is trained"
        yield Problem(where, f"{which!r}", found, "name layers of the tower in train.lora.targets, or leave one out")


def _longest_part(batch: BatchPlan) -> int:
    """A rank's tokens of the longest sequence."""
    return min(batch.tokens_per_sequence, batch.tokens_per_sequence // batch.sequence_ranks + 1)


def tokens_of_a_pass(batch: BatchPlan) -> int:
    """The largest number of tokens of a pass on one rank."""
    longest = _longest_part(batch)
    return min(batch.sequences_per_data_rank * longest, max(longest, batch.tokens_per_micro_batch or longest))


def plan_communication(config: RunConfig, batch: BatchPlan, machine: Machine) -> dict[str, Any] | None:
    """MiB that a rank sends in one pass of the policy, forward and backward; None if no layer is split."""
    shape, train, parallel = shape_in(config), cast(Any, config.train), split_over(config)
    if shape is None or not parallel.is_set:
        return None
    _, dtype = planned(train.device, train.dtype, machine)
    passes = 3 if train.gradient_checkpointing else 2
    shards = train.shard or batch.ranks
    items = sent_in_a_pass(shape, parallel, shards, tokens_of_a_pass(batch), passes=passes, width=BYTES[dtype])
    return {"unit": "MiB of a pass", **_mib(items)}


def plan_memory(config: RunConfig, batch: BatchPlan, machine: Machine, *, is_last: bool = True) -> MemoryPlan | None:
    """The memory of a stage; None if the size of the model or of a micro-batch is unknown."""
    shape, engine, mode = shape_in(config), config.engine, config.run.mode
    train: Any = config.train
    if shape is None or batch.tokens_per_micro_batch is None or not hasattr(train, "gradient_checkpointing"):
        return None
    device, dtype = planned(train.device, train.dtype, machine)
    engine_device, engine_dtype = planned_engine(config, batch, machine)
    tokens = tokens_of_a_pass(batch)
    sequence_tokens = tokens * batch.sequence_ranks  # ranks that share a sequence run the tower over all its images
    trained, frozen = models_of(config, shape)
    averaged = [role for role in frozen if role == "teacher" and _averages(config)]
    models = TrainedModels(
        shape,
        trained,
        frozen,
        averaged,
        adapter=None if train.lora is None else Adapter(train.lora.rank, train.lora.adapted(shape.layers)),
        vision_tower=train.vision_tower,
        dtype=dtype,
        frozen_dtype=train.frozen_dtype,
        gradient_checkpointing=train.gradient_checkpointing,
    )
    gpu = min(machine.gpus, default=0) if device != "cpu" else 0
    split = SplitModels(train.shard or batch.ranks, split_over(config), gpu)
    images = sequence_tokens * min(batch.tasks.prompts.longest, batch.tokens_per_sequence) // batch.tokens_per_sequence
    rank = memory_plan(models, tokens, split, images)
    host: dict[str, int] = {}
    if train.cpu_offload and batch.ranks > 1 and device != "cpu":
        host = {name: rank.pop(name) for name in list(rank) if name.endswith(("weights", "gradients", "optimizer"))}
    held, in_host = {**rank, **host}, rank if device == "cpu" else host
    if device != "cpu":
        # Weights pass through host memory one tensor at a time; those for few bits as a whole, in bfloat16.
        host["loading"] = shape.parameters * 2 if train.frozen_dtype in FEW_BITS else shape.embedding * 4
    if config.checkpoint.asynchronous:
        state = ("weights", "optimizer")
        in_host["checkpoint copy"] = sum(held[f"{role} {part}"] for role in trained for part in state)
        in_host["checkpoint copy"] += sum(held[f"{role} weights"] for role in averaged)
        if train.lora is not None and "policy" in trained:  # it is saved merged, in float32
            in_host["checkpoint copy"] += max(0, shape.parameters * 4 // batch.ranks - held["policy weights"])
    is_sampled = mode == "bench" or is_explored(config) or is_evaluated(config, is_last=is_last)
    if is_sampled and (train.lora is None or train.lora.push != "adapter"):
        in_host |= _travelling(config, batch, shape, BYTES[engine_dtype])
    samples = is_sampled and mode in ("both", "explore", "serve", "tinker", "bench") and hasattr(engine, "max_rows")
    trains = mode in ("both", "train", "serve", "tinker")
    engines = engines_of(config, batch.ranks)
    return MemoryPlan(
        device=device,
        rank=rank if trains else {},
        rank_host=host if trains else {},
        engine=_engine_items(config, shape, batch, machine) if samples else {},
        engine_device=engine_device,
        processes=batch.ranks if trains else 0,
        engines=engines,
        together=config.cluster.kind == "local",
        takes_turns=config.max_staleness == 0 and not getattr(train, "own_process", False),
        sleeps=getattr(engine, "sleep_level", 0) > 0,
        recorded=_recorded(config, shape, batch),
        engine_host=_weight_files(config, shape.parameters * BYTES[engine_dtype], engines, machine) if samples else {},
    )


def _recorded(config: RunConfig, shape: ModelShape, batch: BatchPlan) -> dict[str, int]:
    """Bytes of the recorded routing of rollouts (`train.router_replay`): of each turn, and again of its experience."""
    if not replays_routing(config):
        return {}
    sequences = batch.sequences * (config.max_staleness + 1) * (1 + config.schedule.over_rollout)
    return {"recorded routing": 2 * int(sequences) * batch.tokens_per_sequence * shape.routing_per_token}


def _travelling(config: RunConfig, batch: BatchPlan, shape: ModelShape, width: int) -> dict[str, int]:
    """Bytes by item, for one rank, of weights on their way from the trainer to engines, in host memory; `width` is that
    of a number."""
    items: dict[str, int] = {}
    if config.sync.method is SyncMethod.MEMORY:
        items["published versions"] = kept_versions(config) * shape.parameters * width // batch.ranks
    if config.sync.full_every > 1:  # on both sides: what the next version is compared with, and what it is applied to
        sides = 2 if config.cluster.kind == "local" and config.run.mode == "both" else 1
        items["the last version"] = sides * shape.parameters * width // batch.ranks
    if config.cluster.kind == "local" and engines_of(config, batch.ranks) > 1:
        items["weights received"] = 2 * shape.embedding * width  # one tensor is loaded while the next arrives
    return items


def _weight_files(config: RunConfig, size: int, engines: int, machine: Machine) -> dict[str, int]:
    """Bytes of the files in memory through which one engine gets new weights of `size` bytes: two versions during a
    load. They are on a disk if `engines` engines do not fit into half of the host's memory, the size of /dev/shm."""
    lora = getattr(config.train, "lora", None)
    if not getattr(config.engine, "writes_weights", False) or (lora is not None and lora.push == "adapter"):
        return {}
    fits = not machine.memory or engines * VERSIONS_IN_FILES * size < machine.memory // 2
    return {"weights for vLLM": 2 * size} if fits else {}


def engines_of(config: RunConfig, ranks: int) -> int:
    """The number of engines: on Ray that of the config, else one for each rank that the explorer can use."""
    if config.cluster.kind != "local":
        return config.cluster.explorers * config.cluster.engines
    others = range(1, ranks if config.run.mode in ("both", "serve") else 1)
    return 1 + sum(hosts_engine(config, rank, ranks) for rank in others)


def hosts_engine(config: RunConfig, rank: int, ranks: int) -> bool:
    """Whether a rank beside the run's first one, number `rank` of the `ranks` on its machine, hosts an engine for the
    explorer of the first one. An engine over several GPUs is hosted by the first rank whose GPU it uses."""
    exact = capabilities_of(describe("engines", config.engine.kind)).exact_sampling
    if not exact and not hasattr(config.engine, "gpus"):
        return False  # servers elsewhere sample for all ranks
    gpus = gpus_of(config.engine)
    return rank % gpus == 0 and (gpus == 1 or rank + gpus <= ranks)


def planned(device: str, dtype: str, machine: Machine) -> tuple[str, str]:
    """(`cpu` or `cuda`, type) that a config's device and dtype mean on this machine. Its GPUs are assumed to compute in
    bfloat16."""
    on_gpu = device != "cpu" and (device != "auto" or bool(machine.gpus))
    return "cuda" if on_gpu else "cpu", dtype if dtype != "auto" else "bfloat16" if on_gpu else "float32"


def planned_engine(config: RunConfig, batch: BatchPlan, machine: Machine) -> tuple[str, str]:
    """The same for an engine. On Ray, `auto` is a GPU if the machine has one for each process."""
    device, cluster = str(getattr(config.engine, "device", "cpu")), config.cluster
    if device == "auto" and cluster.kind == "ray" and cluster.address is None:
        trains = batch.ranks * (planned(str(getattr(config.train, "device", "cpu")), "auto", machine)[0] == "cuda")
        samples = cluster.explorers * cluster.engines * gpus_of(config.engine)
        device = "cuda" if len(machine.gpus) >= samples + trains else "cpu"
    return planned(device, getattr(config.engine, "dtype", "auto"), machine)


def gpus_of(engine: object) -> int:
    """The GPUs that one engine computes on."""
    return getattr(engine, "gpus", 1)


def _held_by_gpu(engine: Any, shape: ModelShape, width: int) -> int:
    """Bytes of the weights of an engine on each of its GPUs. All its GPUs together hold each expert once: whole or in
    parts."""
    experts, layers = shape.sparse, getattr(engine, "tensor_parallel_size", 1)
    return ((shape.parameters - experts) // layers + experts // gpus_of(engine)) * width


def _engine_items(config: RunConfig, shape: ModelShape, batch: BatchPlan, machine: Machine) -> dict[str, int]:
    """The memory of an engine with as many completions at once as training or an evaluation asks for. An evaluation
    of unknown size may fill more of `engine.max_rows`."""
    engine: Any = config.engine
    ahead = (config.max_staleness + 1) * (1 + config.schedule.over_rollout)
    wanted = max(int(batch.sequences * ahead) * is_explored(config), batch.tasks.evaluated) or batch.sequences
    limit = engine.max_rows or MAX_ROWS
    rows = min(limit, config.workflow.max_concurrent, limit if config.run.mode == "bench" else wanted)
    prompts, tokens = batch.tasks.prompts, rollout_tokens(config, batch.tasks.prompts)
    device, dtype = planned_engine(config, batch, machine)
    # Engines that sample with other numbers than ours (vLLM) divide their memory themselves.
    is_ours = capabilities_of(describe("engines", engine.kind)).exact_sampling
    prefill = (getattr(engine, "prefill_tokens", None) or 0) if is_ours else 0
    # A pass over the longest prompts has most scores, one over typical prompts has most prompts, with logits each.
    items = max(
        (
            engine_memory(
                shape, dtype=dtype, rows=rows, tokens=tokens, device=device, prefill=prefill, prompt=min(prompt, tokens)
            )
            for prompt in (prompts.longest, prompts.typical)
        ),
        key=lambda items: sum(items.values()),
    )
    if device == "cuda":
        items = {name: size // gpus_of(engine) for name, size in items.items()}
        items["engine"] = _held_by_gpu(engine, shape, BYTES[dtype])
    part = getattr(engine, "gpu_memory_utilization", None)
    if part and device == "cuda" and machine.gpus:  # vLLM reserves this part of the GPU, whatever it needs
        cache = getattr(engine, "cache_gib", None)
        reserved = part * min(machine.gpus) - items["engine"] if cache is None else cache * 2**30
        items = {"engine": items["engine"], "engine reserved": max(0, int(reserved))}
    return items


def models_of(config: RunConfig, shape: ModelShape) -> tuple[list[str], dict[str, ModelShape]]:
    """(trained roles, frozen models by role) of a stage's algorithm."""
    section = config.algorithm.for_run(config)
    build = getattr(resolve("algorithms", section.kind), "build", None)
    if build is None:
        return ["policy", *(["critic"] if section.has_critic else [])], {}
    algorithm = build(section, config.run.seed)
    trained = list(dict.fromkeys(objective.role for objective in algorithm.objectives))
    frozen = {} if "policy" in trained else {"policy": shape}
    shared = {"critic"} if any(objective.head == "lm+value" for objective in algorithm.objectives) else set[str]()
    for role in sorted({_ROLE_OF[what] for what in algorithm.needs if what in _ROLE_OF} - set(trained) - shared):
        teacher = algorithm.teacher if role == "teacher" else None
        weights = teacher.weights if teacher is not None and teacher.path is None else ""
        if weights == "current":
            continue  # it is the policy's model
        if _starts_an_adapter(config) and (role == "reference" or weights == "initial"):
            continue  # it is the policy with its adapter off
        frozen[role] = shape
        if teacher is not None and teacher.path is not None:
            frozen[role] = resolve("models", "hf").shape_in(teacher.path)
    return trained, frozen


def _starts_an_adapter(config: RunConfig) -> bool:
    """Whether the policy without its adapter is the model that the stage begins with."""
    lora = getattr(config.train, "lora", None)
    return lora is not None and lora.path is None


def _averages(config: RunConfig) -> bool:
    """Whether an average of the policy's weights teaches it."""
    teacher = getattr(config.algorithm, "teacher", None)
    return teacher is not None and teacher.path is None and teacher.weights == "average"


# --------------------------------------------------------------------------- refusal


def refuse_what_cannot_fit(plan: MemoryPlan, machine: Machine, where: str = "") -> None:
    """Raises ConfigError for a plan beyond the machine's memory, with the biggest item and what to change about it."""
    for memory, items, available in _exceeded(plan, machine):
        name, biggest = max(items.items(), key=lambda item: item[1])
        raise ConfigError(
            f"{sum(items.values()) / 2**30:.1f} GiB of {memory}{where}",
            f"there are {available / 2**30:.1f} GiB; the biggest item is {name}, {biggest / 2**30:.1f} GiB",
            _KNOBS[name.split()[-1]],
        )


def _exceeded(plan: MemoryPlan, machine: Machine, part: float = 1.0) -> list[tuple[str, Mapping[str, int], int]]:
    """(memory, items in it, its size) of each memory of which the plan takes more than this part."""
    memories = [("host memory", plan.host, machine.memory)]
    if machine.gpus:
        memories.append(("the memory of a GPU", plan.gpu, min(machine.gpus)))
    return [(name, items, size) for name, items, size in memories if size and sum(items.values()) > part * size]
