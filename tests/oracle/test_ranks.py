"""Ranks that train together do what one process does: losses, metrics, gradient norms, weights and scores are equal.

Every program is a row of updates of all three heads, each after the other, so a difference in one shows in all that
follow. The single process makes one micro-batch of each; the ranks make several, and some have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from algebra import column_names, number, objectives, policy_objective
from example_counts import FULL
from hybrid_parts import write_hybrid
from rank_parts_of_splitting import joined
from rank_processes import run_ranks
from training_parts import SIZE, VOCABULARY, Parts, random_model, write_model
from transformers import Qwen3MoeConfig

from trivium.algorithms import ValueObjective, catalogue
from trivium.loops import prepare_mini_batch
from trivium.protocols import TrainEngine
from trivium.training.distributed.data_parallel import DistributedTrainEngine, RankVerbs
from trivium.training.distributed.ranks import ALONE, Ranks
from trivium.training.distributed.torchrun import TorchrunRanks, serve_rank, stop_ranks
from trivium.training.engine import TorchTrainEngine
from trivium.types import EXPERT_VERSION, Batch, Experience, Metrics, Teacher

pytestmark = pytest.mark.timeout(900)  # the ranks of all tests run in the first one

MAX_RESPONSE_LENGTH = 32
SPLIT = {"vocab_size": 34, "intermediate_size": 26}
"""Even numbers whose halves are odd, so that FSDP shards the halves unevenly."""
MODES = tuple(catalogue("aggregations"))

# --------------------------------------------------------------------------- what is trained


def make_batch(lengths: Sequence[int], trained: Sequence[int] | None = None, experts: Sequence[int] = ()) -> Batch:
    """Groups of two with holes in their masks; rows that are not `trained` have none at all."""
    rng = np.random.default_rng(sum(lengths))
    experiences = []
    for row, length in enumerate(lengths):
        mask = rng.random(length) < 0.7
        mask[0], mask[-1] = False, True
        mask &= trained is None or row in trained
        version = np.where(mask & (row not in experts), 0, EXPERT_VERSION)
        tokens = rng.integers(3, VOCABULARY, length)
        experiences.append(Experience(tokens, mask, np.zeros(length), version, f"g{row // 2}", row % 2))
    names = sorted(column_names() - {"uniform", "log_prob", "entropy"})
    noise = {name: [number(name, (1, n), 7 * row)[0].numpy() for row, n in enumerate(lengths)] for name in names}
    return Batch(tuple(experiences)).with_columns(**noise)


def with_prompts(batch: Batch, length: int, size: int) -> Batch:
    """The batch in groups of so many rows that begin with equal tokens."""
    rows: list[Experience] = []
    for row, own in enumerate(batch.experiences):
        first = batch.experiences[row - row % size]
        begin = first.tokens[: min(length, len(first), len(own))]
        tokens = np.concatenate([begin, own.tokens[len(begin) :]])
        rows.append(replace(own, tokens=tokens, group_id=f"p{row // size}"))
    return replace(batch, experiences=tuple(rows))


def with_routing(batch: Batch, length: int, size: int) -> Batch:
    """The batch through experts at random (in two layers, 2 of 8). In every other group of so many rows, all begin with
    the same ones: its prompt was read once, and in the others once for each row."""
    rng, rows = np.random.default_rng(0), list[Experience]()
    for row, own in enumerate(batch.experiences):
        first = rng.integers(1, 8, (len(own), 2, 1))
        if row // size % 2 == 0:
            begin = np.random.default_rng(row // size).integers(1, 8, (length, 2, 1))
            first[:length] = begin[: len(own)]
        routing = np.concatenate([first, first + 1], -1).astype(np.uint8)
        routing[-1] = 0  # the last token went through no layer
        rows.append(replace(own, extra={"routing": routing}))
    return replace(batch, experiences=tuple(rows))


BATCHES = {
    "uneven": make_batch((9, 6, 40, 5, 8, 3, 14, 10, 7, 7), trained=(0, 1, 3, 4, 5, 6, 7, 8, 9)),
    "experts": make_batch((9, 6, 12, 5, 8, 3), experts=(1, 4)),
    "two": make_batch((13, 4)),
    "one": make_batch((12,)),
    "masked": make_batch((8, 9, 7, 12, 6, 6, 9, 11), trained=(2, 3)),
    "nothing": make_batch((5, 6), trained=()),
    "prompts": with_prompts(
        make_batch((47, 49, 48, 47, 28, 27, 27, 30, 6, 7)), 24, 4
    ),  # 119 and 40 tokens: see pack_layout
    "routed": with_routing(with_prompts(make_batch((47, 49, 48, 47, 28, 27, 27, 30, 17, 19, 18, 17)), 14, 4), 14, 4),
}
"""On four ranks, `two` and `one` leave some without a sequence, `masked` two or three without a trained token."""


def near(batch: Batch, log_prob: Sequence[np.ndarray]) -> Batch:
    """The batch with the log-probabilities of others near the model's own, as they are in a run."""

    def moved(distance: float, by: str) -> list[np.ndarray]:
        rows = zip(batch.experiences, log_prob, batch.columns[by], strict=True)
        return [np.where(e.response_mask, row + distance * noise, 0) for e, row, noise in rows]

    engine = moved(1e-2, "returns")
    played = tuple(replace(e, rollout_log_prob=row) for e, row in zip(batch.experiences, engine, strict=True))
    return replace(batch, experiences=played).with_columns(
        old_log_prob=moved(0.2, "advantages"), ref_log_prob=moved(0.3, "values")
    )


def policy(mode: str) -> Any:
    """PPO with everything that is averaged: its own loss, an entropy bonus, a KL penalty."""
    terms = {
        "entropy": objectives(mode)["entropy:exact"]().entropy,
        "kl": objectives(mode)["kl:low_var_kl"]().kl,
    }
    return policy_objective("ppo", mode, terms=terms)


def short() -> Iterator[tuple[str, Any]]:
    """(batch, objective) of two updates of each head; each batch of which some ranks have no part."""
    made = objectives()
    yield "uneven", policy("seq-mean-token-mean")
    yield "uneven", ValueObjective(0.3, "token-mean")
    yield "uneven", made["score:sigmoid"]()
    yield "one", policy("token-sum")
    yield "masked", ValueObjective(0.3, "seq-mean-token-sum")
    yield "two", made["pair:dpo"]()


def prompts() -> Iterator[tuple[str, Any]]:
    """The same, and groups that begin alike."""
    yield from short()
    yield "prompts", policy("token-mean")
    yield "prompts", ValueObjective(0.3, "token-mean")
    yield "prompts", objectives()["pair:dpo"]()


def more() -> Iterator[tuple[str, Any]]:
    """Also what needs the whole vocabulary or whole sequences; selections, gates and teachers."""
    yield from short()
    yield "uneven", objectives()["pair:dpo"]()
    yield "uneven", objectives()["loss:kl_cov"]()
    yield "uneven", objectives()["loss:distill_top_k"]()
    yield "uneven", policy_objective("reinforce", gates=[{"kind": "top_entropy", "narrow": True}])
    yield "uneven", objectives()["loss:gspo"]()


def full() -> Iterator[tuple[str, Any]]:
    """Also groups in one micro-batch, experts, a batch without a trained token, every head on every uneven batch, and
    the losses of the policy and of its critic in every aggregation."""
    begin = [
        *more(),
        ("uneven", replace(policy("token-mean"), unit="group")),
        ("masked", policy("seq-mean-token-sum-norm")),
        ("nothing", policy("token-mean")),
        ("experts", objectives()["loss:mix"]()),
        ("two", policy("token-mean")),
        ("two", objectives()["score:sigmoid"]()),
        ("two", ValueObjective(0.3, "token-mean")),
        ("masked", objectives()["pair:ipo"]()),
    ]
    yield from begin
    tried = {(type(objective), getattr(objective, "aggregate", None)) for _, objective in begin}
    for mode in MODES:
        for made in (policy(mode), ValueObjective(0.3, mode)):
            if (type(made), mode) not in tried:
                yield "uneven", made


def routed() -> Iterator[tuple[str, Any]]:
    """Of a mixture of experts, through those that the tokens were sampled with."""
    yield "routed", policy("token-mean")
    yield "routed", policy("seq-mean-token-mean")


@dataclass(frozen=True)
class Way:
    """How a program is trained."""

    program: Callable[[], Iterator[tuple[str, Any]]] = short
    model: str = "policy"
    dtype: str = "float64"
    packed: bool = True
    config: tuple[tuple[str, Any], ...] = ()


def way(**config: Any) -> Way:
    own = {name: config.pop(name) for name in ("program", "model", "dtype", "packed") if name in config}
    return Way(**own, config=tuple(config.items()))


def replayed(model: str = "mixture", **config: Any) -> Way:
    return way(program=routed, model=model, **config)


TENSOR, EXPERT = {"tensor": 2}, {"expert": 2}
WAYS: Mapping[int, Mapping[str, Way]] = {
    1: {"one": way()},
    2: {
        "full": way(program=full),
        "padded, checkpointing, offload": way(packed=False, gradient_checkpointing=True, cpu_offload=True),
        "shared prompts": way(program=prompts, share_prefix=True),
        "sequence, float32": way(dtype="float32", sequence_parallel=2),
        "routing, shared prompts": replayed(share_prefix=True),
        "routing, sequence, checkpointing": replayed(sequence_parallel=2, gradient_checkpointing=True),
        "tensor": way(model="biased", parallel=TENSOR),
        "expert, routing": replayed(parallel=EXPERT),
        "expert of tensor, float32, routing": replayed(dtype="float32", parallel=TENSOR | EXPERT),
        "hybrid, shared prompts": way(program=prompts, model="hybrid", share_prefix=True),
        "hybrid, expert, routing": replayed("hybrid", parallel=EXPERT),
    },
    4: {
        "four": way(),
        "tensor, padded, offload": way(program=more, parallel=TENSOR, packed=False, cpu_offload=True),
        "tensor, replicas, shared prompts": way(program=prompts, parallel=TENSOR, shard=2, share_prefix=True),
        "tensor, sequence, checkpointing": way(parallel=TENSOR, sequence_parallel=2, gradient_checkpointing=True),
        "expert of all, routing, checkpointing": replayed(parallel={"expert": 4}, gradient_checkpointing=True),
        "expert, replicas, routing": replayed(parallel=EXPERT, shard=2),
        "expert, sequence": way(model="mixture", parallel=EXPERT, sequence_parallel=2),
        "hybrid, expert, tensor, routing": replayed("hybrid", parallel=TENSOR | {"expert": 4}),
        "sequence": way(program=more, sequence_parallel=2),
        "shared prompts, sequence of all, checkpointing": way(
            program=prompts, share_prefix=True, sequence_parallel=4, gradient_checkpointing=True
        ),
        "replicas, sequence, checkpointing, offload": way(
            shard=2, sequence_parallel=2, gradient_checkpointing=True, cpu_offload=True
        ),
    },
}
"""What does not depend on the number of ranks is tried on one number; what does not depend on one another, together."""
FURTHER: Mapping[int, Mapping[str, Way]] = {
    2: {
        "float32": way(dtype="float32"),
        "tensor, float32, checkpointing": way(dtype="float32", parallel=TENSOR, gradient_checkpointing=True),
    },
    4: {
        "expert, tensor": way(model="mixture", parallel=TENSOR | {"expert": 4}),
        "replicas, padded": way(shard=2, packed=False),
    },
}
"""Of HYPOTHESIS=full: each of them has two facts of those above, which try them with others."""
if FULL:
    WAYS = {size: {**ways, **FURTHER.get(size, {})} for size, ways in WAYS.items()}
CASES = [(size, name) for size, ways in WAYS.items() for name in ways]

# --------------------------------------------------------------------------- training it


def make_engine(directory: Path, how: Way, ranks: Ranks, max_tokens: int) -> TorchTrainEngine:
    config = TorchTrainEngine.Config(
        device="cpu",
        dtype=how.dtype,
        max_grad_norm=1.0,
        max_tokens_per_micro_batch=max_tokens,
        optimizer={"lr": 0.1, "eps": 1.0},  # with an epsilon this large AdamW follows the gradient, not its sign
        router_replay="rollout" if how.program is routed else "off",
        **dict(how.config),
    )
    engine = TorchTrainEngine(
        config,
        model_dir=directory / how.model,
        algorithm=algorithm(directory, how),
        temperature=0.8,
        max_response_length=MAX_RESPONSE_LENGTH,
        total_steps=100,
        seed=0,
        threads=1,
        ranks=ranks,
    )
    engine.prepare()
    for learner in engine._learners.values() if not how.packed else ():
        learner.model.backbone.packs = False
        learner.model.module.set_attn_implementation("sdpa")
    return engine


def algorithm(directory: Path, how: Way) -> Parts:
    trained = tuple({objective.role: objective for _, objective in how.program()}.values())
    further = frozenset({"ref", "teacher_top"}) if how.program in (more, full) else frozenset()
    return Parts(trained, needs=further, teacher=Teacher(str(directory / "teacher"), top_k=3))


@dataclass(frozen=True)
class Trained:
    """What became of a program."""

    metrics: list[Metrics]
    """Of each update."""
    weights: list[Any]
    """The policy's, before the first update, then after every tenth and the last."""
    scores: dict[str, list[np.ndarray]]


def train(engine: TrainEngine, how: Way, batches: Mapping[str, Batch]) -> Trained:
    program, metrics, weights = list(how.program()), [], [exported(engine)]
    for step, (batch, objective) in enumerate(program):
        prepared = prepare_mini_batch(engine, batches[batch], objective, 0)
        measured = engine.measure(objective.role, prepared, objective) if step % 3 == 0 else {}
        metrics.append({**engine.update(objective.role, prepared, objective), **prepared.metrics})
        assert measured == pytest.approx({key: metrics[-1][key] for key in measured}), "the update that is not made"
        engine.version += 1
        if step % 10 == 9 or step + 1 == len(program):
            weights.append(exported(engine))
    further = (
        ("entropy", "sum_pi_squared", "mean_discriminant", "ref", "teacher_top") if how.program in (more, full) else ()
    )
    asked = [("log_prob", program[0][0]), *((what, "uneven") for what in further)]
    if "critic" in {objective.role for _, objective in program}:
        asked.append(("values", "one"))
    scores = {what: engine.score(batches[name], what) for what, name in asked}
    return Trained(metrics, weights, scores)


def exported(engine: TrainEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.export_weights()}


def on_ranks(rank: int, size: int, directory: Path, batches: Mapping[str, Batch]) -> dict[str, Trained]:
    def build(name: str) -> tuple[Ranks, TorchTrainEngine]:
        how = WAYS[size][name]
        config = dict(how.config)
        sizes = {"sequence": config.get("sequence_parallel", 1), "shard": config.get("shard", 0)}
        ranks = joined(**sizes, **config.get("parallel", {}), device="cpu")
        assert (ranks.size, ranks.rank) == (size, rank)
        return ranks, make_engine(directory, how, ranks, max_tokens=30)

    if rank > 0:
        serve_rank("cpu", lambda name: RankVerbs(build(name)[1]))
        return {}
    done = {}
    for name, how in WAYS[size].items():
        group = TorchrunRanks("cpu", name, lambda name=name: build(name))
        said = {"max_response_length": MAX_RESPONSE_LENGTH, "share_prefix": dict(how.config).get("share_prefix", False)}
        engine = DistributedTrainEngine(group, algorithm(directory, how), **said)
        done[name] = train(engine, how, batches)
    stop_ranks("cpu")
    return done


# --------------------------------------------------------------------------- comparing


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    write_model(directory / "policy", **SPLIT)
    write_model(directory / "teacher", seed=5, **SPLIT)
    write_model(directory / "biased", "llama", attention_bias=True, mlp_bias=True, **SPLIT)
    mixture = Qwen3MoeConfig(**SIZE | SPLIT, head_dim=4, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2)
    random_model(mixture, seed=0, scale=8.0).save_pretrained(directory / "mixture")
    write_hybrid(directory / "hybrid", "qwen3_next", num_experts=8, **SPLIT)
    return directory


@pytest.fixture(scope="module")
def batches(directory: Path) -> dict[str, Batch]:
    engine, mixture = (make_engine(directory, how, ALONE, max_tokens=1000) for how in (way(), replayed()))
    engines = {name: mixture if name == "routed" else engine for name in BATCHES}
    return {name: near(batch, engines[name].score(batch, "log_prob")) for name, batch in BATCHES.items()}


@pytest.fixture(scope="module")
def found(directory: Path, batches: dict[str, Batch], tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("ranks") / "trained"
    done = run_ranks(list(WAYS), on_ranks, folder, directory, batches, deadline_s=720.0)
    return {size: said[0] for size, said in done.items()}


@pytest.fixture(scope="module")
def expected(directory: Path, batches: dict[str, Batch]) -> Any:
    """By one process, each distinct program once."""
    plain = {replace(how, packed=True, config=()) for ways in WAYS.values() for how in ways.values()}
    return {how: train(make_engine(directory, how, ALONE, max_tokens=1000), how, batches) for how in plain}


@pytest.mark.parametrize(("size", "name"), CASES)
def test_equals_one_process(size: int, name: str, found: Any, expected: Any) -> None:
    how = WAYS[size][name]
    ranks, alone = found[size][name], expected[replace(how, packed=True, config=())]
    close = 1e-9 if how.dtype == "float64" else 1e-6
    loss = close if how.dtype == "float64" else 4e-6  # a sum of terms of both signs, each of which is rounded
    for step, (mine, theirs) in enumerate(zip(ranks.metrics, alone.metrics, strict=True)):
        exact = {key for key in theirs if key.startswith(("train/loss", "train/grad_norm"))}
        for keys, tolerance in ((exact, loss), (theirs.keys() - exact, 10 * close)):  # some are exponentials of sums
            got = {key: mine[key] for key in keys}
            assert got == pytest.approx({key: theirs[key] for key in keys}, rel=tolerance, abs=tolerance), list(
                how.program()
            )[step]
        assert mine.keys() == theirs.keys()
    for mine, theirs in zip(ranks.weights, alone.weights, strict=True):
        assert list(mine) == list(theirs)
        for weight, value in mine.items():
            torch.testing.assert_close(
                value, theirs[weight], rtol=close, atol=close * float(theirs[weight].abs().max())
            )
    for what, rows in alone.scores.items():
        for mine, theirs in zip(ranks.scores[what], rows, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6, err_msg=what)  # float32 on the way


def test_the_programs_try_what_they_say(expected: Any) -> None:
    for how, alone in expected.items():
        norms = [norm for row in alone.metrics for key, norm in row.items() if key.startswith("train/grad_norm")]
        assert min(norms) < 1.0 < max(norms)  # some are clipped, some are not
        assert min(norms) > 1e-4
        first, last = alone.weights[0], alone.weights[-1]
        assert all(not torch.equal(first[name], last[name]) for name in first), how
    longest = max(expected.values(), key=lambda alone: len(alone.metrics))
    assert sum("train/grad_norm/policy" not in row and "train/tokens" in row for row in longest.metrics) > 0
