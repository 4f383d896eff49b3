"""What Trivium chooses by the machine and by the size of the model: the limits, and `choices` for one stage.

The data type changes the precision of what a run computes. Other choices change at most the last bits. `choices` names
the benchmark of each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from trivium.planning.model_shape import BYTES

if TYPE_CHECKING:
    from trivium.config.schema import RunConfig

MIB = 2**20

# --------------------------------------------------------------------------- engines on a CPU

PACKED_BYTES = 256 * MIB
"""A model, or an output layer, of up to this size is stored a second time, in the order in which oneDNN reads it."""
DECODE_BYTES = 64 * MIB
"""Largest model whose rows are split over threads: every thread reads all weights, which must fit the cache."""
DECODE_ROWS = 16
"""Smallest number of rows per thread."""
PROMPT_CHUNK = 512
"""Prompts are computed in chunks that start at multiples of this, so that the shape of a chunk depends on its prompt
alone."""
SAMPLED_TOGETHER = 2**22
"""The largest number of logits that are sampled from together."""

MAX_ROWS = 512
"""The largest number of completions in progress that Trivium chooses, and that of an engine without a plan."""

# --------------------------------------------------------------------------- training on a CPU

UPDATE_BYTES = 256 * MIB
"""Largest size of the gradients of all threads together for parallel micro-batches: each thread holds its own. An
update of SmolLM2-135M with LoRA takes 0.9 of the time with a micro-batch in each of two threads."""
UPDATE_TOKENS, FEW_UPDATE_TOKENS = 2048, 1024
"""Approximate number of tokens of a parallel micro-batch, and the smallest for which threads are worth it. The
activations of a larger one do not stay in the cache."""
MICRO_BATCH_TOKENS = 16384
"""The largest number of tokens of a micro-batch that Trivium chooses, and that of a train engine without a plan."""
MIN_SHARED = 16
"""A shared run of tokens must save at least this many tokens."""
FOLLOWING_PER_SHARED = 64
"""At most this many tokens may follow a shared run for each token that it saves. Beyond, the gain is within the
variation of a step's time."""

# --------------------------------------------------------------------------- the output layer in training

LOGITS_CACHE_BYTES = 4 * MIB
"""The preferred memory for the logits of one chunk on a CPU: it fits a core's cache."""
LOGITS_ROWS = 256
"""The smallest number of rows with efficient matrix products. It overrides `LOGITS_CACHE_BYTES`, not `LOGITS_BYTES`."""
LOGITS_BYTES = 64 * MIB
"""The largest memory for the logits of one chunk on a CPU, and the smallest limit on a GPU."""
LOGITS_PART_OF_GPU = 128
"""On a GPU, the logits of a chunk take 1/128 of the total memory. The free memory does not count: the chunk size
changes the last bits of results, which must not depend on what else the GPU holds."""


def logits_rows(row_bytes: int, gpu: int = 0) -> int:
    """How many rows of logits of `row_bytes` each are computed together; `gpu` is the memory of the GPU, 0 on a CPU."""
    if gpu:
        return max(1, max(gpu // LOGITS_PART_OF_GPU, LOGITS_BYTES) // row_bytes)
    return max(1, min(max(LOGITS_CACHE_BYTES // row_bytes, LOGITS_ROWS), LOGITS_BYTES // row_bytes))


def decoding_threads(weight_bytes: int, threads: int) -> int:
    """How many threads of an engine on a CPU each compute rows of their own."""
    return threads if weight_bytes <= DECODE_BYTES else 1


def updating_threads(gradient_bytes: int, threads: int, max_tokens: int) -> int:
    """How many threads of a train engine on a CPU each compute a micro-batch of their own."""
    return max(1, min(threads, max_tokens // FEW_UPDATE_TOKENS, UPDATE_BYTES // max(1, gradient_bytes)))


def micro_batch_tokens(weight_bytes: int, device: str, *, adapter: bool = False) -> int:
    """How many tokens a micro-batch has at most if memory does not count. On a CPU, twice as many make an update of all
    weights 4 % faster and take 1.9 GiB more (docs/memory.md). Threads that compute micro-batches at once share them: at
    least two if an `adapter` is trained, whose gradients are small."""
    threads = max(2 if adapter else 1, UPDATE_BYTES // max(1, weight_bytes)) if device == "cpu" else MICRO_BATCH_TOKENS
    return min(MICRO_BATCH_TOKENS, UPDATE_TOKENS * threads)


class Choice(NamedTuple):
    """One choice of a stage."""

    value: str
    rule: str
    benchmark: str
    """The file in `benchmarks/` that measures it."""


def threads_of(stage: RunConfig, cores: int, ranks: int, *, own_process: bool) -> int:
    """How many threads engine and trainer have each, on a machine with `cores` and `ranks` training ranks."""
    # An engine and a train engine in two processes compute at the same time; in one process they mostly take turns.
    at_once = 2 if own_process and stage.max_staleness else 1
    return stage.cluster.threads or max(1, cores // (ranks * at_once))


def choices(
    stage: RunConfig,
    parameters: int,
    threads: int,
    engine: tuple[str, str] | None,
    trainer: tuple[str, str],
    *,
    trained: int,
    parallel: bool,
    max_tokens: int | None,
) -> dict[str, Choice]:
    """The choices for a stage with a model of so many parameters, of which an update changes `trained`.

    `engine` and `trainer` are (device, dtype); `engine` is None for engines that choose for themselves. `parallel` is
    whether micro-batches may be computed at once: by one rank, for a model that reads text only. `max_tokens` is the
    budget of a micro-batch, if the train engine has one.
    """
    sampling = "" if engine is None else f"engine {engine[1]} on {engine[0]}, "
    chosen = {
        "threads": Choice(f"{threads}", "cluster.threads, else usable cores by what computes at once", "async.py"),
        "dtype": Choice(
            f"{sampling}trainer {trainer[1]} on {trainer[0]}",
            "auto: bfloat16 on a GPU, float32 on a CPU, where bfloat16 is faster on some processors only",
            "peers.py --dtype bfloat16",
        ),
    }
    if engine is not None and engine[0] == "cpu":
        size = parameters * BYTES[engine[1]]
        rows = decoding_threads(size, threads)
        chosen["engine weights"] = Choice(
            "stored again in oneDNN's order" if size <= PACKED_BYTES else "stored once",
            f"{_limit(size, PACKED_BYTES, 'weights')}; an output layer of that size again in any case",
            "decode.py",
        )
        chosen["decode steps"] = Choice(
            f"{rows} threads, each its own rows" if rows > 1 else f"all rows together, {threads} thread(s)",
            f"{_limit(size, DECODE_BYTES, 'weights')}, {DECODE_ROWS} rows or more for each thread; fewer rows: "
            "all threads in each operation",
            "decode.py",
        )
    if trainer[0] == "cpu" and max_tokens is not None:
        size = trained * BYTES[trainer[1]]
        workers = updating_threads(size, threads, max_tokens) if parallel else 1
        limit = f"{_limit(size, UPDATE_BYTES, 'gradients')} for all threads together, up to {UPDATE_TOKENS} tokens each"
        chosen["micro-batches"] = Choice(
            f"{workers} at once, a thread each" if workers > 1 else f"one at a time, {threads} thread(s)",
            limit if parallel else "at once only with one rank and a model that reads text only",
            "peers.py",
        )
        chosen["matrix products"] = Choice(
            "oneDNN, weight gradients by the faster library", "float32 on a CPU with oneDNN", "peers.py"
        )
    if getattr(stage.train, "share_prefix", False):
        rule = f"{MIN_SHARED} tokens saved, and one for each {FOLLOWING_PER_SHARED} that follow"
        chosen["shared prompts"] = Choice("computed once", rule, "prefix.py")
    return chosen


def _limit(size: int, most: int, what: str) -> str:
    return f"{size / MIB:.1f} MiB of at most {most // MIB} MiB of {what}"
