"""Sequences that begin with the same tokens compute them once, and nothing else changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from algebra import objectives
from hypothesis import given
from hypothesis import strategies as st
from prefix_parts import make_batch, sequences, words
from training_parts import SIZE, Parts, Reinforce, SquaredError, make_engine, weights, write_model
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from vision_parts import picture, rolled_out, tiny

from trivium.foundation.phases import Phase
from trivium.models.backbone.packed import pack
from trivium.models.backbone.prefix_attention import tree_attention
from trivium.models.backbone.prefixes import Prefixes, is_gain
from trivium.models.backbone.shape import read_shape
from trivium.models.heads.trained_models import LanguageModel, ScoreModel, ValueModel
from trivium.training.batching import cut_sharing, prefixes_of
from trivium.training.distributed.data_parallel import shares_of, shares_of_groups
from trivium.types import Batch, Experience, Media

CPU = torch.device("cpu")
PPO = Parts((Reinforce(), SquaredError(unit="sequence")), frozenset({"old", "ref", "values"}))
HEADS: dict[str, Any] = {"lm": LanguageModel, "value": ValueModel, "score": ScoreModel}


# --------------------------------------------------------------------------- what is shared


@given(st.lists(st.lists(st.sampled_from([1, 2]), min_size=1, max_size=9), min_size=1, max_size=12), st.integers(1, 20))
def test_every_sequence_is_a_path_of_the_tree(many: list[list[int]], times: int) -> None:
    stretched = [np.repeat(np.array(tokens, np.int32), times) for tokens in many]
    tree = Prefixes(stretched).tree(range(len(many)))
    packed = pack(stretched, tree=tree)
    whole = torch.from_numpy(np.concatenate(stretched).astype(np.int64))
    assert torch.equal(packed.tokens[packed.rows], whole)
    assert torch.equal(packed.positions[packed.rows], torch.cat([torch.arange(len(each)) for each in stretched]))
    assert len(packed.tokens) == tree.num_tokens <= len(whole)
    assert tree.shares == (tree.num_tokens < len(whole))
    inner = packed.positions[packed.rows] > 0
    before = packed.rows.roll(1)
    assert torch.equal(packed.before[packed.rows][inner], before[inner])
    layout = packed.layout()
    assert torch.equal(packed.tokens[layout.spread[layout.collect]], packed.tokens)
    for trunk in layout.trunks:  # all that comes behind it, and nothing else, passes through it
        own = {int(row) for row in range(trunk.behind, trunk.stop)}
        start = 0
        for tokens in stretched:
            rows = set(packed.rows[start : start + len(tokens)].tolist())
            assert trunk.behind - 1 in rows or not rows & own
            start += len(tokens)


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("shared", [True, False])
def test_a_last_token_is_not_computed_where_its_state_is_not_read(head: str, shared: bool, tmp_path: Path) -> None:
    many = sequences()
    tree = Prefixes(many).tree(range(len(many))) if shared else None
    how: dict[str, Any] = {"temperature": 1.0} if head == "lm" else {"seed": 0}
    model = HEADS[head](write_model(tmp_path), dtype=torch.float64, device=CPU, **how)
    whole, shorter = pack(many, tree=tree), pack(many, tree=tree, skip_ends=True)
    assert shorter.num_rows == whole.num_rows - (
        9 if shared else len(many)
    )  # two are equal, one ends where others go on
    assert torch.equal(shorter.tokens[shorter.rows], whole.tokens[whole.rows])
    inner = torch.cat([torch.arange(len(each)) for each in many]) > 0
    results: list[list[torch.Tensor]] = []
    for packed in (whole, shorter):
        numbers = model(packed, packed.rows[inner])
        values = numbers[0] if isinstance(numbers, tuple) else numbers
        weights = torch.linspace(-1, 1, len(values), dtype=torch.float64)
        parameters = [each for each in model.parameters() if each.requires_grad]
        gradients = torch.autograd.grad((values * weights).sum(), parameters, allow_unused=True)
        results.append([values.detach(), *(each for each in gradients if each is not None)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_the_prompt_of_a_group_and_what_its_members_share_is_there_once() -> None:
    many = sequences()
    assert (
        Prefixes(many).tree(range(len(many))).num_tokens == 20 + 13 + (3 + 9 + 5) + (4 + 1) + 18 + (8 + 7 + 2) + 6 + 9
    )
    short = [np.concatenate([[5, 6], [n]]) for n in range(7, 12)]
    assert not Prefixes(short).tree(range(5)).shares  # 8 tokens fewer are not worth it
    assert is_gain(1024, 16, 512)
    assert is_gain(4, 8, 8 * 64)
    assert not is_gain(10, 8, 8 * 1024)


def test_beginnings_of_beginnings() -> None:
    """Turns that each are a sequence of their own, with everything before them; and more than Python could recur."""
    whole = np.arange(4000, dtype=np.int32)
    assert Prefixes([whole[: 200 * n] for n in range(1, 21)]).tree(range(20)).num_tokens < 4000 + 1000
    assert Prefixes([whole[:n] for n in range(1, 1501)]).tree(range(1500)).leaves.count(-1) == 0


@pytest.mark.parametrize("budget", [1, 40, 70, 10_000])
def test_micro_batches_count_shared_tokens_once(budget: int) -> None:
    batch = make_batch()
    prefixes, families = prefixes_of(batch), [e.group_id for e in batch.experiences]
    row_units = [[row] for row in range(len(batch))]
    cut = cut_sharing(row_units, families, prefixes, budget)
    assert sorted(row for rows in cut for row in rows) == list(range(len(batch)))
    assert all(prefixes.tree(rows).num_tokens <= budget or len(rows) == 1 for rows in cut)
    if budget == 70:  # the first group has 64 tokens, 214 if none are shared
        assert any({families[row] for row in rows} == {families[0]} and len(rows) == 8 for rows in cut)


def test_images_are_shared_whole() -> None:
    tokens = np.arange(50, dtype=np.int32) % 7
    one, other = Media("image/png", b"1", span=(10, 20)), Media("image/png", b"2", span=(10, 20))
    mask = np.arange(50) > 40

    def member(media: tuple[Media, ...]) -> Experience:
        return Experience(tokens, mask, np.zeros(50, np.float32), np.where(mask, 0, -1), "g", 0, media=media)

    def shared(*media: tuple[Media, ...]) -> int:
        rows = tuple(map(member, media))
        return 50 * len(rows) - prefixes_of(Batch(rows)).tree(range(len(rows))).num_tokens

    assert shared((one,), (one,)) == 50
    assert shared((one,), (other,), (one,), (other,)) == 100 - 0
    assert shared((), (one,)) == 0  # ten tokens are not worth it


# --------------------------------------------------------------------------- attention


@pytest.mark.parametrize("window", [None, 5, 30])
@pytest.mark.parametrize(("width", "with_sinks"), [(4, False), (6, False), (4, True), (6, True)])
@pytest.mark.parametrize(
    ("clump", "copied", "kinds"),
    [
        (0, 0.0, (3, False, False)),
        (0, 1.6, (2, True, False)),
        (0, 9.0, (0, True, False)),
        (40, 0.0, (1, False, True)),
        (40, 9.0, (0, True, True)),
        (96, 0.0, (0, False, True)),
    ],
)
def test_attention_in_the_tree_is_attention_in_each_sequence(
    clump: int,
    copied: float,
    kinds: tuple[int, bool, bool],
    window: int | None,
    width: int,
    with_sinks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`kinds`: how many segments are attended to as they are, whether others are copied, and whether subtrees share a
    row of a grid. Values as wide as keys go through
    torch's kernel; others through the arithmetic written out."""
    monkeypatch.setattr("trivium.models.backbone.pack_layout._CLUMP", clump)
    monkeypatch.setattr("trivium.models.backbone.pack_layout._COPIED", copied)
    monkeypatch.setattr("trivium.models.backbone.pack_layout._FEW", 0)
    many = sequences()
    packed = pack(many, tree=Prefixes(many).tree(range(len(many))))
    rows = packed.layout()
    assert (len(rows.trunks), rows.copies, rows.masks.count(None) < len(rows.masks)) == kinds
    torch.manual_seed(0)
    shapes = ((4, 4), (2, 4), (2, width))
    q, k, v = (torch.randn(len(packed.tokens), *shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def alone(places: torch.Tensor) -> torch.Tensor:
        index = torch.arange(len(places))
        behind = index[:, None] - index
        seen = (behind >= 0) & (behind < (window or 1000))
        parts = [q[places], k[places].repeat_interleave(2, 1), v[places].repeat_interleave(2, 1)]
        scores = torch.einsum("lhd,shd->hls", parts[0], parts[1]) * 0.3
        scores = scores.masked_fill(~seen, -torch.inf)
        if with_sinks:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(places), 1)], -1)
        return torch.einsum("hls,shd->lhd", scores.softmax(-1)[..., : len(places)], parts[2])

    expected = torch.cat([alone(places) for places in packed.rows.split(list(packed.lengths))])
    found = tree_attention(q, k, v, rows, 0.3, window, sinks if with_sinks else None)[packed.rows]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(expected)
    inputs = (q, k, v, sinks) if with_sinks else (q, k, v)
    gradients = [torch.autograd.grad((x * weight).sum(), inputs) for x in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-11)


# --------------------------------------------------------------------------- models


def write(directory: Path, name: str) -> Path:
    if name != "qwen3_moe":
        return write_model(directory, name)
    experts: dict[str, Any] = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 4}
    config = Qwen3MoeConfig(**SIZE, **experts, norm_topk_prob=True)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("name", "head"),
    [
        *((name, "lm") for name in ("qwen3", "llama", "gpt2", "mistral", "qwen3_moe")),
        ("llama", "value"),
        ("qwen3", "score"),
    ],
)
@pytest.mark.parametrize("clump", [0, 96])
def test_a_model_says_the_same_and_learns_the_same(
    name: str, head: str, clump: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trivium.models.backbone.pack_layout._CLUMP", clump)
    how: dict[str, Any] = {"temperature": 0.7} if head == "lm" else {"seed": 3}
    dtype = torch.float32 if name == "qwen3_moe" else torch.float64  # torch has no grouped product in float64
    close = 1e-4 if name == "qwen3_moe" else 1e-9
    model = HEADS[head](write(tmp_path, name), dtype=dtype, device=CPU, **how)
    many = sequences()
    trained = torch.from_numpy(np.flatnonzero(np.concatenate([np.arange(len(each)) > 0 for each in many])))
    found: list[list[torch.Tensor]] = []
    for tree in (None, Prefixes(many).tree(range(len(many)))):
        packed = pack(many, tree=tree)
        model.zero_grad()
        answer = model(packed, packed.rows[trained], **({"entropy_grad": True} if head == "lm" else {}))
        numbers = torch.stack(answer) if head == "lm" else answer[None]
        (numbers * torch.arange(len(trained))).sin().sum().backward()
        found.append([numbers.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for plain, shared in zip(*found, strict=True):
        torch.testing.assert_close(shared, plain, rtol=close, atol=close * float(plain.abs().max()))


def rows_of_layers(engine: Any, batch: Batch, role: str, objective: Any) -> int:
    """Rows that the first layer computes in an update, the fill of the last ones of a pass included."""
    seen: list[int] = []
    layer = engine._learners[role].model.backbone.module.layers[0]
    handle = layer.register_forward_hook(lambda layer, args, output: seen.append(args[0].shape[1]))
    engine.update(role, batch, objective)
    handle.remove()
    return sum(seen)


def step(engine: Any, batch: Batch) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for objective in engine.algorithm.objectives:
        looked = {what: engine.score(batch, what) for what in sorted(getattr(objective, "looks_at", ()))}
        whole = batch.with_columns(**looked)
        chosen = objective.select(whole, 0) if looked else whole
        metrics |= engine.measure(objective.role, chosen, objective)
        metrics |= engine.update(objective.role, chosen, objective)
    return metrics


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


ALGORITHMS: dict[str, Any] = {
    "ppo": PPO,
    "groups": Parts((Reinforce(unit="group", entropy_coef=0.1, needs=frozenset({"advantages", "entropy"})),)),
    "dpo": lambda: Parts((objectives()["pair:dpo"](),)),
    "reward model": lambda: Parts((objectives()["score:sigmoid"](),)),
}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        *((name, {"max_tokens_per_micro_batch": budget}) for name in ("ppo", "dpo") for budget in (1, 70)),
        *((name, {}) for name in ALGORITHMS),
        ("ppo", {"gradient_checkpointing": True}),
        ("ppo", {"lora": {"rank": 2}}),
    ],
)
def test_an_update_is_the_same_whatever_is_shared(name: str, config: dict[str, Any], model_dir: Path) -> None:
    algorithm = ALGORITHMS[name]() if callable(ALGORITHMS[name]) else ALGORITHMS[name]
    batch = make_batch(advantages=0.3, returns=1.0, ref_log_prob=-1.0).select(range(12))
    found: list[tuple[Any, ...]] = []
    for share in (False, True):
        train = {"dtype": "float64", "optimizer": {"lr": 0.1, "eps": 1.0}, "share_prefix": share, **config}
        engine = make_engine(model_dir, algorithm, **train)
        scores = [engine.score(batch, what) for what in sorted(algorithm.needs)]
        metrics = step(engine, batch)
        after = [p.detach() for each in engine._learners.values() for p in each.model.parameters()]
        found.append((metrics, [torch.from_numpy(row) for rows in scores for row in rows], after))
    (plain, plain_scores, plain_weights), (shared, shared_scores, shared_weights) = found
    assert shared == pytest.approx(plain, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(shared_scores, plain_scores, rtol=1e-6, atol=1e-6)  # they are float32
    torch.testing.assert_close(shared_weights, plain_weights, rtol=1e-9, atol=1e-9)
    assert max(value for key, value in plain.items() if "grad_norm" in key) > 1e-3


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "llava"])
def test_images_of_a_prompt_are_computed_once(family: str, tmp_path: Path) -> None:
    path = tiny(tmp_path / "model", family)
    rng, first = np.random.default_rng(0), asyncio.run(rolled_out(path)).experiences[0]
    last = max(item.span[1] for item in first.media if item.span)
    strange = replace(picture(7), span=first.media[0].span)  # as large as the first one, in its place
    rows: list[Experience] = []
    for index in range(8):
        tokens = np.concatenate([first.tokens[: last + 1], rng.integers(3, 8, 3 + index).astype(np.int32)])
        mask = np.arange(len(tokens)) > last
        media = (strange, *first.media[1:]) if index % 2 else first.media
        rows.append(Experience(tokens, mask, np.where(mask, -1.0, 0), np.where(mask, 0, -1), "g", index, media=media))
    batch = Batch(tuple(rows)).with_columns(advantages=[rng.normal(size=len(e)) for e in rows])
    found: list[tuple[Any, ...]] = []
    for share in (False, True):
        engine = make_engine(path, dtype="float64", optimizer={"lr": 0.1, "eps": 1.0}, share_prefix=share)
        seen: list[int] = []
        vision: Any = engine._learners["policy"].model.backbone.vision
        features = vision.features
        vision.features = lambda images, seen=seen, features=features: (
            seen.append(len(images.pixels)) or features(images)
        )
        scores = engine.score(batch, "old")
        metrics = engine.update("policy", batch, Reinforce())
        found.append((scores, metrics, weights(engine), seen))
    (plain_scores, plain, plain_weights, plain_seen), (scores, metrics, after, seen) = found
    assert (plain_seen, seen) == ([len(first.media) * 8] * 2, [len(first.media) * 2] * 2)
    close = 1e-9 if family == "llava" else 1e-7  # Qwen's towers rotate in float32
    assert metrics == pytest.approx(plain, rel=close)
    assert all(np.allclose(a, b, atol=1e-6) for a, b in zip(scores, plain_scores, strict=True))
    assert all(torch.allclose(after[name], each, rtol=0, atol=close) for name, each in plain_weights.items())
    assert not np.allclose(scores[2][last + 1], scores[3][last + 1], atol=1e-4)  # they saw something else


def test_fewer_rows_are_computed(model_dir: Path) -> None:
    prompt, *ends = words(np.random.default_rng(1), 50, *[10] * 12)
    mask = np.arange(60) >= 50
    rows = [
        Experience(np.concatenate([prompt, end]), mask, np.where(mask, -1.0, 0), np.where(mask, 0, -1), "g", i)
        for i, end in enumerate(ends)
    ]
    batch = Batch(tuple(rows)).with_columns(advantages=[np.ones(60)] * 12)
    engines = [make_engine(model_dir, share_prefix=share, peak_flops=1e9) for share in (False, True)]
    counts = [rows_of_layers(engine, batch, "policy", Reinforce()) for engine in engines]
    assert counts == [768, 160]  # 12 x 60, and 50 + 12 x 10 without last tokens, filled to multiples of 128 and 32
    shape = read_shape(model_dir)
    for engine, tokens, squares in zip(
        engines, (720, 50 + 120), (12 * 60**2, 50**2 + 12 * (60**2 - 50**2)), strict=True
    ):
        flops = shape.flops(tokens, squares, 120, backward=True)
        for _ in range(2):  # it may be asked again
            found = engine.utilisation({"update/policy": Phase(2.0, 720, 12 * 60**2, 120)})
            assert found["perf/mfu/update"] == pytest.approx(flops / 2e9)


def test_equal_rewards_have_no_gradient(model_dir: Path) -> None:
    engine = make_engine(model_dir, share_prefix=True)
    batch = make_batch(advantages=0.0)
    batch = batch.with_columns(advantages=[np.zeros(len(e)) for e in batch.experiences])
    assert engine.update("policy", batch, Reinforce())["train/grad_norm/policy"] == 0.0


def test_what_cannot_share_does_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="trivium")
    directory = write_model(tmp_path, "bloom")
    batch = make_batch(advantages=0.3)
    after = []
    for share in (False, True):
        engine = make_engine(directory, share_prefix=share)
        engine.update("policy", batch, Reinforce())
        after.append(weights(engine))
    assert all(torch.equal(after[0][name], after[1][name]) for name in after[0])
    assert "prefixes are not shared" in caplog.text


def test_two_runs_are_one(model_dir: Path) -> None:
    batch = make_batch(advantages=0.3)
    after = []
    for _ in range(2):
        engine = make_engine(model_dir, share_prefix=True)
        engine.update("policy", batch, Reinforce())
        after.append(weights(engine))
    assert all(torch.equal(after[0][name], after[1][name]) for name in after[0])


def test_bfloat16_is_near(model_dir: Path) -> None:
    batch = make_batch(advantages=0.3)
    norms = [
        make_engine(model_dir, share_prefix=share, dtype=dtype).update("policy", batch, Reinforce())
        for share, dtype in ((False, "float32"), (False, "bfloat16"), (True, "bfloat16"))
    ]
    exact, plain, shared = (each["train/grad_norm/policy"] for each in norms)
    assert abs(shared - exact) < 2 * abs(plain - exact) + 0.02 * exact


# --------------------------------------------------------------------------- ranks


@pytest.mark.parametrize("num_shares", [1, 2, 4])
def test_members_of_a_group_go_to_one_rank_where_that_is_less_work(num_shares: int) -> None:
    batch = make_batch()
    groups = [replace(e, group_id=f"{n} {e.group_id}") for n in range(2) for e in batch.experiences]
    batch = Batch(tuple(groups))
    row_units = [[row] for row in range(len(batch))]
    prefixes = prefixes_of(batch)

    def heaviest(shares: Sequence[Sequence[int]]) -> int:
        return max(prefixes.tree(rows).num_tokens for rows in shares)

    together, apart = (make(row_units, batch, num_shares) for make in (shares_of_groups, shares_of))
    assert sorted(row for rows in together for row in rows) == list(range(len(batch)))
    assert heaviest(together) <= heaviest(apart)
    pairs = [[row, row + 1] for row in range(0, 24, 2)]
    for rows in shares_of_groups(pairs, batch, num_shares):
        assert all([*pair] in pairs for pair in zip(rows[::2], rows[1::2], strict=True))
