"""How much memory a stage will want, estimated from config and config.json alone, and whether the machine has it.

What is held (weights, gradients, optimizer state, caches) is counted; what a pass needs on the way (activations) is an
estimate that measured training steps agree with (tests/unit/test_memory_plan.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trivium.config.engine_memory import BYTES, MIB, engine_memory
from trivium.config.machine import Machine
from trivium.config.model_shape import FEW_BITS, ModelShape, frozen_weights, read_shape
from trivium.config.vision_shape import VisionShape
from trivium.errors import ConfigError, Problem, TriviumError
from trivium.registry import resolve
from trivium.types import SyncMethod, capabilities_of

if TYPE_CHECKING:
    from trivium.config.schema import RunConfig

PROMPT_TOKENS = 1024
"""The prompt assumed beside `max_new_tokens`, where the model's context has room for it; of a model that sees, all of
it images."""
RUNTIME = 512 * MIB
"""What a process with torch takes before it holds a model."""
_ROLE_OF = {"ref": "reference", "teacher": "teacher", "teacher_top": "teacher", "values": "critic"}
_HEAD_BYTES = 64 * MIB
"""Logits of one chunk of the head, and their gradient, at most; on a GPU this part of its memory, if that is more."""
_HEAD_PART_OF_GPU = 256
_FEWER_WEIGHTS = "train.lora, train.frozen_dtype: bfloat16, more ranks, train.cpu_offload on GPUs, or a smaller model"
_KNOBS = {
    "activations": "lower train.max_tokens_per_micro_batch, or set train.gradient_checkpointing",
    "optimizer": f"use {_FEWER_WEIGHTS}",
    "gradients": f"use {_FEWER_WEIGHTS}",
    "weights": f"use {_FEWER_WEIGHTS}",
    "head": "set train.frozen_dtype: float32, or use a model with a smaller vocabulary",
    "dequantized": "use a smaller model: its widest matrix is in bfloat16 while it is computed with",
    "gathered": "use a smaller model: the largest layer and the head are whole on each rank while they compute",
    "cache": "lower engine.max_rows, engine.max_context or engine.sampling.max_new_tokens",
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
}
"""What to change about an item, by the last word of its name."""


@dataclass(frozen=True)
class BatchPlan:
    """What one train step is cut into. Sequences are whole ones at their full length, so the numbers are bounds."""

    prompts: int
    group_size: int
    sequences: int
    """Prompts times group size: what one step is trained on."""
    mini_batches: int
    """Optimizer steps of one pass over the batch."""
    epochs: int
    """Passes over the batch."""
    ranks: int
    data_ranks: int
    """Ranks that hold different sequences; the others share theirs (`train.sequence_parallel`)."""
    sequences_per_data_rank: int
    """Of one mini-batch, at most."""
    tokens_per_sequence: int
    """Prompt and completion: the longest one, or the model's context."""
    tokens_per_micro_batch: int | None
    """The budget of one pass on one rank; None where the train engine names none."""
    micro_batches: int | None
    """Of one mini-batch on one data rank, at most."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by item."""

    device: str
    """Where training ranks compute: `cpu` or `cuda`."""
    rank: Mapping[str, int]
    """On the device of one training rank."""
    rank_host: Mapping[str, int]
    """In host memory, for one training rank on a GPU."""
    engine: Mapping[str, int]
    """Of one rollout engine, on its own device."""
    engine_device: str
    processes: int
    """Training ranks."""
    engines: int
    together: bool
    """Whether the first rank and the engine are one process."""
    sleeps: bool = False
    """Whether the engine leaves their GPU to the rank while that learns."""
    recorded: Mapping[str, int] = field(default_factory=dict[str, int])
    """Of rollouts that wait or are trained on, in host memory: what grows with a model beside its vocabulary."""

    @property
    def host(self) -> dict[str, int]:
        """All that lies in host memory, where every role runs on this machine."""
        ranks = self.rank if self.device == "cpu" else self.rank_host
        items = {name: number * self.processes for name, number in ranks.items()}
        if self.engine_device == "cpu":
            items |= {name: number * self.engines for name, number in self.engine.items()}
        apart = self.engines if self.engine and not (self.together and self.processes) else 0
        return {**items, **self.recorded, "runtime": RUNTIME * (self.processes + apart)}

    @property
    def gpu(self) -> dict[str, int]:
        """What lies on the fullest GPU: a rank or an engine, and both where the two share a process."""
        rank = dict(self.rank) if self.device == "cuda" else {}
        engine = dict(self.engine) if self.engine_device == "cuda" else {}
        idle = {name: n for name, n in rank.items() if name.endswith(("weights", "optimizer"))} if self.sleeps else rank
        both = [idle | engine] if self.together else [engine]
        items = max(rank, *both, key=lambda each: sum(each.values()))
        return items and {**items, "runtime": RUNTIME}

    def summary(self, machine: Machine) -> dict[str, Any]:
        """For the plan: MiB by item, what is needed in all, and what is available."""
        shown: dict[str, Any] = {"each rank": _mib(self.rank) | {"device": self.device, "ranks": self.processes}}
        if self.rank_host and self.device != "cpu":
            shown["each rank, host"] = _mib(self.rank_host)
        if self.engine:
            shown["each engine"] = _mib(self.engine) | {"device": self.engine_device, "engines": self.engines}
        if self.recorded:
            shown["rollouts, host"] = _mib(self.recorded)
        needed: dict[str, Any] = {"host": round(sum(self.host.values()) / MIB)}
        available: dict[str, Any] = {"host": round(machine.memory / MIB) if machine.memory else "unknown"}
        if self.gpu:
            needed["gpu"] = round(sum(self.gpu.values()) / MIB)
            available["gpus"] = [round(gpu / MIB) for gpu in machine.gpus]
        return {"unit": "MiB", **shown, "needed": needed, "available": available}


def _mib(items: Mapping[str, int]) -> dict[str, Any]:
    shown: dict[str, Any] = {name: round(number / MIB, 1) for name, number in items.items() if number}
    return {**shown, "total": round(sum(items.values()) / MIB, 1)}


# --------------------------------------------------------------------------- counting


def memory_plan(
    shape: ModelShape,
    *,
    trained: Collection[str] = ("policy",),
    frozen: Mapping[str, ModelShape] | None = None,
    tokens: int,
    dtype: str = "float32",
    gradient_checkpointing: bool = False,
    adapter_rank: int = 0,
    shards: int = 1,
    vision_tower: str | None = None,
    image_tokens: int = 0,
    frozen_dtype: str = "float32",
    gpu: int = 0,
) -> dict[str, int]:
    """Bytes by item on one rank that trains models of `shape` (a critic has the policy's) and holds frozen ones.

    `tokens` go through one pass; `shards` ranks hold a part each. Weights, gradients and the two moments of the
    optimizer are float32 (float64 for that dtype); `bfloat16` halves what layers keep for the backward pass, norms
    aside. With `adapter_rank` the policy trains low-rank adapters only. What is not trained is kept in `frozen_dtype`,
    and its head made wider where it computes. `image_tokens` of the tokens are images', and
    `vision_tower` says what of the image side is trained. `gpu` is the memory of the GPU it has, 0 for none.
    """
    wide = 8 if dtype == "float64" else 4
    few = FEW_BITS.get(frozen_dtype)
    kept = wide if dtype == "float64" else 2 if few else min(wide, BYTES[frozen_dtype])
    items: dict[str, int] = {}
    for role in trained:
        adapted = role == "policy" and adapter_rank > 0
        own = shape.parameters if role == "policy" else shape.backbone + shape.hidden
        frozen_vision = 0 if shape.vision is None else shape.vision.parameters - shape.vision.trained(vision_tower)
        moving = adapter_parameters(shape, adapter_rank) if adapted else own - frozen_vision
        held = frozen_weights(shape, kept, few) + moving * wide if adapted else own * wide
        items[f"{role} weights"] = held // shards
        items[f"{role} gradients"] = moving * wide // shards
        items[f"{role} optimizer"] = 2 * moving * wide // shards
    for role, its in (frozen or {}).items():
        # A policy that is neither trained nor the base of an adapter is saved as it is: in no fewer bits.
        items[f"{role} weights"] = frozen_weights(its, kept, None if role == "policy" else few) // shards
    adapts = adapter_rank > 0 and "policy" in trained
    narrowed = [*(frozen or {}).values(), *[shape] * adapts]
    if kept < wide and narrowed:
        items["float32 head"] = max(each.embedding for each in narrowed) * wide
    if shards > 1:  # the root with its embeddings, and two layers: one computes while the next is gathered
        narrow = BYTES[dtype]
        items["gathered"] = (2 * shape.block * narrow + shape.embedding * (1 if shape.tied else 2) * wide) * 2
    elif dtype == "bfloat16" and not (adapts and kept == BYTES[dtype]):
        # autocast keeps the matrices it cast until the pass is over
        items["gathered"] = shape.layers * (shape.attention + shape.experts * shape.expert) * 2
    if few and narrowed:  # a matrix is made wide where it is used, forward or backward
        items["dequantized"] = 2 * max(each.hidden * each.mlp for each in narrowed) * BYTES[dtype]
    items["activations"] = activations(shape, tokens, dtype, gradient_checkpointing, gpu)
    if shape.vision is not None:
        learns = vision_tower in (None, "trained") and not adapter_rank
        items["vision activations"] = _vision_activations(
            shape.vision, image_tokens, dtype, all_layers=learns and not gradient_checkpointing
        )
    return items


def _vision_activations(vision: VisionShape, image_tokens: int, dtype: str, *, all_layers: bool) -> int:
    """Bytes that a pass of the tower over images of so many tokens needs: about one and a half numbers for each that a
    patch is multiplied with, in all of its layers or in those at work, and the input of each layer."""
    layer = 3 * vision.block // (2 * vision.hidden)
    patch = layer * (vision.layers + 1 if all_layers else min(3, vision.layers + 1)) + vision.layers * vision.hidden
    return image_tokens * vision.patches_per_token * patch * BYTES[dtype]


def activations(shape: ModelShape, tokens: int, dtype: str, gradient_checkpointing: bool, gpu: int = 0) -> int:
    """Bytes that one forward and backward pass over so many tokens needs at its peak."""
    narrow, wide = BYTES[dtype], 8 if dtype == "float64" else 4
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    through = 4 * query + 8 * key + (4 if shape.gated else 3) * shape.mlp * shape.active_experts
    layer = through * narrow + 4 * shape.hidden * (narrow + wide)  # norms compute in float32 whatever the dtype
    whole = layer * (3 if gradient_checkpointing else shape.layers + 1)  # beside it, gradients of one layer
    kept = shape.layers * shape.hidden * wide * gradient_checkpointing
    chunk = max(_HEAD_BYTES, gpu // _HEAD_PART_OF_GPU)
    chunk = chunk if gpu else min(chunk, max(4 * MIB, 256 * shape.vocabulary * wide))
    logits = min(chunk, tokens * shape.vocabulary * wide)
    return tokens * (whole + kept + 3 * shape.hidden * wide) + 3 * logits


def adapter_parameters(shape: ModelShape, rank: int) -> int:
    """Parameters of low-rank adapters of that rank at every linear layer but the head."""
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    ends = 2 * (shape.hidden + query) + 2 * (shape.hidden + key)
    ends += shape.experts * (3 if shape.gated else 2) * (shape.hidden + shape.mlp)
    return shape.layers * rank * ends


# --------------------------------------------------------------------------- of a config


def plan_batch(config: RunConfig, ranks: int) -> BatchPlan:
    """How one train step of a stage is cut."""
    schedule, train, algorithm = config.schedule, config.train, config.algorithm
    sequences = schedule.groups_per_step * schedule.group_size
    mini_batches = min(int(getattr(algorithm, "mini_batches", 1)), schedule.groups_per_step)
    data_ranks = max(1, ranks // int(getattr(train, "sequence_parallel", 1)))
    share = -(-sequences // mini_batches // data_ranks)
    tokens = sequence_tokens(config)
    budget: int | None = getattr(train, "max_tokens_per_micro_batch", None)
    micro_batches = None
    if budget is not None:
        together = max(1, budget * max(1, ranks // data_ranks) // tokens)
        micro_batches = -(-share // together)
    return BatchPlan(
        schedule.groups_per_step,
        schedule.group_size,
        sequences,
        mini_batches,
        int(getattr(algorithm, "epochs", 1)),
        ranks,
        data_ranks,
        share,
        tokens,
        budget,
        micro_batches,
    )


def sequence_tokens(config: RunConfig) -> int:
    """The longest sequence that is to be expected."""
    shape = shape_in(config)
    limits = [getattr(config.engine, "max_context", None), shape.max_positions if shape is not None else None]
    return min([config.engine.sampling.max_new_tokens + PROMPT_TOKENS, *(int(limit) for limit in limits if limit)])


def kept_versions(config: RunConfig) -> int:
    """How many of the newest versions can be had. Explorers of a resumed run may need every one since the oldest that a
    pending slot is sampled with."""
    return config.max_staleness // config.sync.interval + 2


def context_limit(config: RunConfig) -> int | None:
    """Tokens of prompt and completion together that the engine takes; None where its section does not tell."""
    if not hasattr(config.engine, "max_context"):
        return None
    shape = shape_in(config)
    return getattr(config.engine, "max_context", None) or (None if shape is None else shape.max_positions)


def shape_in(config: RunConfig) -> ModelShape | None:
    """The shape of the policy, where its section gives it without building or loading the model."""
    shape = getattr(config.model, "shape", None)
    try:
        return shape() if callable(shape) else None  # pyright: ignore[reportReturnType]
    except TriviumError:  # an architecture that config.json does not describe in the usual words
        return None


def vision_in(config: RunConfig) -> str | None:
    """What of the image side of a stage's model is trained; None where it has none, or its size is not known."""
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
    return f"{vision.family}: {', '.join([*parts, *['an adapter trained'] * adapted])}"


def vision_problems(run: RunConfig, which: str | None, where: str, *, adapted: bool) -> Iterator[Problem]:
    """What is wrong with `train.vision_tower`."""
    shape = shape_in(run)
    if which in ("trained", "projector") and shape is not None and shape.vision is None:
        yield Problem(where, f"{which!r}", "the model reads text only", "leave the key out")
    if adapted and which in ("trained", "projector"):
        found = "with train.lora the adapter is all that is trained"
        yield Problem(where, f"{which!r}", found, "name layers of the tower in train.lora.targets, or leave one out")


def plan_memory(config: RunConfig, batch: BatchPlan, machine: Machine) -> MemoryPlan | None:
    """The memory of a stage; None where the sizes of model or micro-batch are unknown."""
    shape, engine = shape_in(config), config.engine
    train: Any = config.train
    if shape is None or batch.tokens_per_micro_batch is None or not hasattr(train, "gradient_checkpointing"):
        return None
    device, dtype = planned(train.device, train.dtype, machine)
    longest = min(batch.tokens_per_sequence, batch.tokens_per_sequence * batch.data_ranks // batch.ranks + 1)
    tokens = min(batch.sequences_per_data_rank * longest, max(longest, batch.tokens_per_micro_batch))
    seen = tokens * (batch.ranks // batch.data_ranks)  # ranks that share a sequence run the tower over all its images
    trained, frozen = models_of(config, shape)
    lora = getattr(train, "lora", None)
    if lora is not None:
        frozen.pop("reference", None)  # the policy with its adapter off
    rank = memory_plan(
        shape,
        trained=trained,
        frozen=frozen,
        tokens=tokens,
        dtype=dtype,
        gradient_checkpointing=train.gradient_checkpointing,
        adapter_rank=0 if lora is None else lora.rank,
        shards=train.shard or batch.ranks,
        vision_tower=getattr(train, "vision_tower", None),
        frozen_dtype=getattr(train, "frozen_dtype", "float32"),
        gpu=min(machine.gpus, default=0) if device != "cpu" else 0,
        image_tokens=seen * min(PROMPT_TOKENS, batch.tokens_per_sequence) // batch.tokens_per_sequence,
    )
    host: dict[str, int] = {}
    if getattr(train, "cpu_offload", False) and batch.ranks > 1 and device != "cpu":
        host = {name: rank.pop(name) for name in list(rank) if name.endswith(("weights", "gradients", "optimizer"))}
    kept = rank if device == "cpu" else host
    if device != "cpu":
        few = getattr(train, "frozen_dtype", "") in FEW_BITS
        # Weights go through host memory one tensor at a time; those for few bits whole, in bfloat16.
        host["loading"] = shape.parameters * 2 if few else shape.embedding * 4
    held = {**rank, **host}
    if config.checkpoint.asynchronous:
        state = ("weights", "optimizer")
        kept["checkpoint copy"] = sum(held[f"{role} {part}"] for role in trained for part in state)
        if lora is not None and "policy" in trained:  # it is saved merged, in float32
            kept["checkpoint copy"] += max(0, shape.parameters * 4 // batch.ranks - held["policy weights"])
    if lora is None or lora.push != "adapter":
        width = BYTES[_planned_engine(config, batch, machine)[1]]
        kept |= _travelling(config, batch, shape.parameters * width, shape.embedding * width)
    local = config.cluster.kind == "local"
    explores = config.run.mode in ("both", "explore", "serve", "bench")
    samples, trains = explores and hasattr(engine, "max_rows"), config.run.mode in ("both", "train", "serve")
    return MemoryPlan(
        device=device,
        rank=rank if trains else {},
        rank_host=host if trains else {},
        engine=_engine_items(config, shape, batch, machine) if samples else {},
        engine_device=_planned_engine(config, batch, machine)[0],
        processes=batch.ranks if trains else 0,
        engines=_engines(config, batch.ranks),
        together=local,
        sleeps=getattr(engine, "sleep_level", 0) > 0,
        recorded=_recorded(config, shape, batch),
    )


def _recorded(config: RunConfig, shape: ModelShape, batch: BatchPlan) -> dict[str, int]:
    """Bytes of the routing that rollouts bring (`train.router_replay`): of a turn, and once more of its experience."""
    if not replays_routing(config):
        return {}
    sequences = batch.sequences * (config.max_staleness + 1) * (1 + config.schedule.over_rollout)
    return {"recorded routing": 2 * int(sequences) * batch.tokens_per_sequence * shape.routing_per_token}


def replays_routing(config: RunConfig) -> bool:
    """Whether rollouts are asked for the experts of their tokens."""
    return getattr(config.train, "router_replay", "off") == "rollout"


def _travelling(config: RunConfig, batch: BatchPlan, size: int, largest: int) -> dict[str, int]:
    """Bytes by item, for one rank, of weights of this size and of their largest tensor between trainer and engines, in
    host memory."""
    items: dict[str, int] = {}
    if config.sync.method is SyncMethod.MEMORY:
        items["published versions"] = kept_versions(config) * size // batch.ranks
    if config.cluster.kind == "local" and _engines(config, batch.ranks) > 1:
        items["weights received"] = 2 * largest  # one is loaded while the next arrives
    return items


def _engines(config: RunConfig, ranks: int) -> int:
    """How many there are: on Ray those of the config, else one for each rank that the explorer can use."""
    if config.cluster.kind != "local":
        return config.cluster.explorers * config.cluster.engines
    exact = capabilities_of(resolve("engines", config.engine.kind)).exact_sampling
    return ranks if exact and config.run.mode in ("both", "serve") else 1


def planned(device: str, dtype: str, machine: Machine) -> tuple[str, str]:
    """(`cpu` or `cuda`, type) that a config's device and dtype come to on this machine, GPUs being such as compute in
    bfloat16."""
    on_gpu = device != "cpu" and (device != "auto" or bool(machine.gpus))
    return "cuda" if on_gpu else "cpu", dtype if dtype != "auto" else "bfloat16" if on_gpu else "float32"


def _planned_engine(config: RunConfig, batch: BatchPlan, machine: Machine) -> tuple[str, str]:
    """The same for an engine: on Ray, what is left to the machine is on GPUs where there is one for each process."""
    device, cluster = str(getattr(config.engine, "device", "cpu")), config.cluster
    if device == "auto" and cluster.kind == "ray" and cluster.address is None:
        trains = batch.ranks * (planned(str(getattr(config.train, "device", "cpu")), "auto", machine)[0] == "cuda")
        device = "cuda" if len(machine.gpus) >= cluster.explorers * cluster.engines + trains else "cpu"
    return planned(device, getattr(config.engine, "dtype", "auto"), machine)


def _engine_items(config: RunConfig, shape: ModelShape, batch: BatchPlan, machine: Machine) -> dict[str, int]:
    """As many completions at once as training asks for; an evaluation may fill more of `engine.max_rows`."""
    engine: Any = config.engine
    ahead = (config.max_staleness + 1) * (1 + config.schedule.over_rollout)
    rows = min(engine.max_rows, config.workflow.max_concurrent, int(batch.sequences * ahead))
    tokens = batch.tokens_per_sequence
    device, dtype = _planned_engine(config, batch, machine)
    # Engines that sample with other numbers than ours (vLLM) divide their memory themselves.
    own = capabilities_of(resolve("engines", engine.kind)).exact_sampling
    prefill = (getattr(engine, "prefill_tokens", None) or 0) if own else 0
    prompt = min(PROMPT_TOKENS, tokens)
    items = engine_memory(shape, dtype=dtype, rows=rows, tokens=tokens, device=device, prefill=prefill, prompt=prompt)
    part = getattr(engine, "gpu_memory_utilization", None)
    if part and device == "cuda" and machine.gpus:  # vLLM reserves this part of the GPU, however much it needs
        cache = getattr(engine, "cache_gib", None)
        reserved = part * min(machine.gpus) - items["engine"] if cache is None else cache * 2**30
        items = {"engine": items["engine"], "engine reserved": max(0, int(reserved))}
    return items


def models_of(config: RunConfig, shape: ModelShape) -> tuple[list[str], dict[str, ModelShape]]:
    """(roles that are trained, frozen models) of a stage's algorithm."""
    section = config.algorithm.for_run(config)
    build = getattr(resolve("algorithms", section.kind), "build", None)
    if build is None:
        return ["policy", *(["critic"] if section.has_critic else [])], {}
    algorithm = build(section, config.run.seed)
    trained = list(dict.fromkeys(objective.role for objective in algorithm.objectives))
    frozen = {} if "policy" in trained else {"policy": shape}
    shared = {"critic"} if any(objective.head == "lm+value" for objective in algorithm.objectives) else set[str]()
    for role in sorted({_ROLE_OF[what] for what in algorithm.needs if what in _ROLE_OF} - set(trained) - shared):
        teacher = algorithm.teacher.path if role == "teacher" and algorithm.teacher is not None else None
        frozen[role] = read_shape(teacher) if teacher is not None else shape
    return trained, frozen


# --------------------------------------------------------------------------- refusal


def refuse_what_cannot_fit(plan: MemoryPlan, machine: Machine, where: str = "") -> None:
    """Raises ConfigError, with the biggest item and what to change about it, for a plan beyond the machine's memory."""
    memories = [("host memory", plan.host, machine.memory)]
    if machine.gpus:
        memories.append(("the memory of a GPU", plan.gpu, min(machine.gpus)))
    for memory, items, available in memories:
        needed = sum(items.values())
        if available and needed > available:
            name, biggest = max(items.items(), key=lambda item: item[1])
            raise ConfigError(
                f"{needed / 2**30:.1f} GiB of {memory}{where}",
                f"there are {available / 2**30:.1f} GiB; the biggest item is {name}, {biggest / 2**30:.1f} GiB",
                _KNOBS[name.split()[-1]],
            )
