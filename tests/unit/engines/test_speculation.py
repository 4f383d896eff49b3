"""Speculation: every completion has the bits of one without drafts, and drafts are made only where they pay."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trivium.engines.torch.batch import Batch, Ticket, bucket
from trivium.engines.torch.decoder import Decoder, _between
from trivium.engines.torch.drafts import Drafts, Follower
from trivium.engines.torch.engine import TorchEngine
from trivium.engines.torch.selfcheck import verifies_drafts
from trivium.foundation.randomness import SampleKey
from trivium.planning.choices import DRAFTED_ROWS
from trivium.types import Completion, Request, Sampling

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 75,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
GPT2 = {"vocab_size": 40, "n_embd": 36, "n_layer": 2, "n_head": 3, "n_positions": 512}
MODELS = {
    "qwen3": ("qwen3", SIZES),
    "qwen2": ("qwen2", SIZES),
    "narrow": ("llama", {**SIZES, "hidden_size": 48, "num_key_value_heads": 4, "head_dim": 12}),
    "windows": ("mistral", {**SIZES, "sliding_window": 9, "num_key_value_heads": 1}),
    "gpt2": ("gpt2", GPT2),
    "gemma2": ("gemma2", {**SIZES, "sliding_window": 12}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random models on disk, so certain of most tokens that a second completion repeats much of the first."""
    found = {}
    for name, (kind, sizes) in MODELS.items():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(4)
        found[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(found[name])
    return found


def requests(epoch: int, tasks: int = 3, group: int = 4, length: int = 20, **sampling: Any) -> list[Request]:
    how = {"max_new_tokens": 60, "temperature": 0.05, **sampling}
    return [
        Request(
            np.random.default_rng(task).integers(3, 40, length + 7 * task).astype(np.int32),
            Sampling(**how),
            SampleKey(3, "train", "t", str(task), epoch, index),
        )
        for task in range(tasks)
        for index in range(group)
    ]


async def completed(
    path: Path, epochs: Sequence[Sequence[Request]], *, threads: int = 1, eos: Sequence[int] = (1, 2), **config: Any
) -> tuple[list[Completion], dict[str, int]]:
    """The completions of several epochs, one after the other, and the engine's counters."""
    engine = TorchEngine(
        TorchEngine.Config.model_validate(config),
        model_dir=path,
        eos_token_ids=frozenset(eos),
        decode=lambda tokens: "".join(chr(48 + token) for token in tokens),
        threads=threads,
    )
    try:
        done = [each for epoch in epochs for each in await asyncio.gather(*map(engine.generate, epoch))]
        return done, engine.counters
    finally:
        await engine.close()


def assert_same(drafted: Sequence[Completion], plain: Sequence[Completion]) -> None:
    for one, other in zip(drafted, plain, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.log_prob.tobytes() == other.log_prob.tobytes()
        assert one.policy_version.tolist() == other.policy_version.tolist()
        assert one.stop_reason is other.stop_reason
        assert one.extra.keys() == other.extra.keys()
        for name, value in one.extra.items():
            assert np.array_equal(value, other.extra[name]), name


HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "long": {"max_new_tokens": 300},
    "stopped": {"stop": ("A", "MN")},
    "at least": {"min_new_tokens": 40},
    "truncated": {"temperature": 0.06, "top_p": 0.9, "top_k": 3, "min_p": 0.01, "extra": ("kept", "prompt_log_prob")},
    "greedy": {"temperature": 0.0},
}


@pytest.mark.parametrize(
    ("name", "how"), [*((name, "plain") for name in MODELS), *(("qwen3", how) for how in HOW if how != "plain")]
)
async def test_completions_have_the_bits_of_those_without_drafts(
    models: dict[str, Path], name: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    epochs = [requests(epoch, **HOW[how]) for epoch in range(3)]
    drafted, counters = await completed(models[name], epochs)
    plain, without = await completed(models[name], epochs, speculation=False)
    assert_same(drafted, plain)
    assert 0 < counters["drafts_accepted"] <= counters["tokens_drafted"]
    assert counters["steps"] < without["steps"]
    assert counters["tokens_sampled"] == without["tokens_sampled"]
    assert without["tokens_drafted"] == 0
    assert not caplog.records


async def test_company_threads_and_rows_that_are_used_again_change_no_bit(models: dict[str, Path]) -> None:
    epochs = [requests(epoch, tasks=5, group=12, max_new_tokens=40) for epoch in range(2)]
    plain, _ = await completed(models["qwen3"], epochs, speculation=False)
    for threads, rows in ((1, 3), (2, 12), (2, 16)):
        drafted, counters = await completed(models["qwen3"], epochs, threads=threads, max_rows=rows)
        assert_same(drafted, plain)
        assert counters["drafts_accepted"]


async def test_without_invariant_arithmetic_only_rounding_differs(models: dict[str, Path]) -> None:
    epochs = [requests(epoch) for epoch in range(2)]
    drafted, counters = await completed(models["qwen3"], epochs, batch_invariant=False)
    plain, _ = await completed(models["qwen3"], epochs, speculation=False)
    assert counters["drafts_accepted"]
    for one, other in zip(drafted, plain, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(one.log_prob, other.log_prob, atol=1e-4)


async def test_later_turns_repeat_those_of_earlier_rollouts(models: dict[str, Path]) -> None:
    """The prompt of a second turn differs between rollouts; its task does not."""
    turns: list[list[Request]] = []
    first = await completed(models["qwen3"], [requests(0, tasks=1)], speculation=False)
    for epoch in range(2):
        for index, done in enumerate(first[0]):
            prompt = np.concatenate([requests(0, tasks=1)[0].prompt_tokens, done.tokens, np.array([5], np.int32)])
            key = SampleKey(3, "train", "t", "0", epoch, index, (1,))
            turns.append([Request(prompt, Sampling(60, temperature=0.05), key)])
    drafted, counters = await completed(models["qwen3"], turns)
    plain, _ = await completed(models["qwen3"], turns, speculation=False)
    assert_same(drafted, plain)
    assert counters["drafts_accepted"]


async def test_streams_report_each_token_once_and_cancelling_frees_rows(models: dict[str, Path]) -> None:
    engine = TorchEngine(
        TorchEngine.Config.model_validate({}),
        model_dir=models["qwen3"],
        eos_token_ids=frozenset(),
        decode=str,
        threads=1,
    )
    heard: list[tuple[int, float]] = []

    def on_tokens(tokens: Sequence[int], log_probs: Sequence[float]) -> None:
        heard.extend(zip(tokens, log_probs, strict=True))

    try:
        await asyncio.gather(*map(engine.generate, requests(0)))
        long = [asyncio.ensure_future(engine.generate(each)) for each in requests(1, max_new_tokens=400)]
        done = await engine.stream(requests(2)[0], on_tokens)
        for each in long:
            each.cancel()
        again = await engine.generate(requests(2)[0])
    finally:
        await engine.close()
    assert heard == list(zip(done.tokens.tolist(), done.log_prob.tolist(), strict=True))
    assert_same([again], [done])
    assert engine.counters["drafts_accepted"]


class Rows:
    """A batch that a test steps by hand."""

    def __init__(self, path: Path, drafts: Drafts | None) -> None:
        self.decoder = Decoder(path, dtype=torch.float32, device="cpu", exact=True)
        self.batch = Batch(self.decoder, 16, frozenset(), str, drafts)
        self.done: dict[SampleKey, Completion] = {}

    def run(
        self, asked: Sequence[Request], version: int = 0, until: Callable[[Batch], bool] = lambda _: False
    ) -> dict[SampleKey, int]:
        """Admits requests and steps until all have finished or `until` holds. Returns the lengths so far."""
        if asked:
            tickets = [Ticket(each, each.sampling.max_new_tokens, None, each.key.digest()) for each in asked]
            prefixes = [self.decoder.read([each.prompt_tokens])[0] for each in asked]
            self._note(self.batch.admit(tickets, prefixes, version))
        while self.batch.live and not until(self.batch):
            self._note(self.batch.step(version))
        rows = ((row, ticket) for row, ticket in enumerate(self.batch.tickets) if ticket is not None)
        return {ticket.request.key: int(self.batch._rows.count[row]) for row, ticket in rows}

    def _note(self, done: Sequence[tuple[Ticket, Completion]]) -> None:
        self.done |= {ticket.request.key: completion for ticket, completion in done}


@torch.inference_mode()
def test_weights_loaded_in_mid_completion_change_the_same_tokens(models: dict[str, Path]) -> None:
    """Where the new weights begin differs between rows, because drafts bring some further. Without drafts, loading them
    at that token of each row gives the same bits."""
    torch.manual_seed(8)
    weights = [
        (name, value + 0.02 * torch.randn_like(value))
        for name, value in AutoModelForCausalLM.from_pretrained(models["qwen3"]).state_dict().items()
    ]
    drafts = Drafts()
    rows = Rows(models["qwen3"], drafts)
    rows.run(requests(0))
    asked = requests(1, max_new_tokens=80)
    before = drafts.accepted
    lengths = rows.run(asked, until=lambda batch: int(batch._rows.count.max()) > 30)
    assert drafts.accepted > before
    assert len(set(lengths.values())) > 1, "no row got further than another"
    rows.decoder.load(weights)
    rows.run((), version=7)
    for each in asked:
        alone = Rows(models["qwen3"], None)
        at = lengths[each.key]
        alone.run([each], until=lambda batch, at=at: int(batch._rows.count.max()) == at)
        alone.decoder.load(weights)
        alone.run((), version=7)
        versions = rows.done[each.key].policy_version.tolist()
        assert versions == [0] * at + [7] * (80 - at)
        assert_same([rows.done[each.key]], [alone.done[each.key]])


# --------------------------------------------------------------------------- what is drafted


def follower(drafts: Drafts, tokens: Sequence[int] = (1, 2, 3, 4, 5)) -> Follower:
    found = drafts.follower(("t", "0"), np.array(tokens[:4], np.int32))
    drafts.advance(found, tokens[4:])
    return found


def kept(drafts: Drafts, continuation: Sequence[int], log_prob: float = 0.0) -> None:
    tokens = np.array([5, *continuation], np.int32)
    drafts.keep(("t", "0"), np.array([1, 2, 3, 4], np.int32), tokens, np.full(len(tokens), log_prob, np.float32))


def test_drafts_are_what_followed_in_the_newest_completion() -> None:
    drafts = Drafts()
    assert drafts.choose([follower(drafts)], [50], 1, bucket) is None
    kept(drafts, [9] * 10)
    kept(drafts, list(range(10, 30)))
    (chosen,) = drafts.choose([follower(drafts)], [50], 1, bucket) or [[]]
    assert chosen == list(range(10, 10 + len(chosen)))
    assert len(chosen) > 5
    assert drafts.choose([follower(drafts)], [3], 1, bucket) == [[10, 11, 12]]
    wrong = follower(drafts)
    drafts.advance(wrong, [10, 11, 7])
    (chosen,) = drafts.choose([wrong], [50], 1, bucket) or [[]]
    assert chosen[:2] == [13, 14], "after a wrong token the source continues"


def test_drafts_come_from_the_prompt_too() -> None:
    drafts = Drafts()
    one = drafts.follower(("t", "1"), np.array([*range(4, 30), 31], np.int32))
    drafts.advance(one, [4, 5, 6, 7])
    chosen = drafts.choose([one], [50], 1, bucket)
    assert chosen is not None
    assert chosen[0][:2] == [8, 9]


def test_improbable_tokens_and_many_rows_get_no_drafts() -> None:
    drafts = Drafts()
    kept(drafts, range(10, 30), log_prob=-5.0)
    assert drafts.choose([follower(drafts)] * 8, [50] * 8, 8, bucket) is None
    kept(drafts, range(10, 30), log_prob=-0.2)
    few, many = (drafts.choose([follower(drafts)] * rows, [50] * rows, rows, bucket) for rows in (4, 48))
    assert few is not None
    assert min(map(len, few)) > 0
    assert many is None


def test_a_source_that_is_always_wrong_is_no_longer_drafted_from() -> None:
    drafts = Drafts()
    kept(drafts, range(10, 30))
    for _ in range(300):
        drafts.advance(follower(drafts), [8])
    assert drafts.choose([follower(drafts)] * 8, [50] * 8, 8, bucket) is None


def test_the_memory_of_completions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trivium.engines.torch.drafts._TASK_TOKENS", 100)
    monkeypatch.setattr("trivium.engines.torch.drafts._ALL_TOKENS", 1000)
    drafts = Drafts()
    for task in range(100):
        for _ in range(10):
            drafts.keep(
                ("t", str(task)),
                np.arange(3, 9, dtype=np.int32),
                np.arange(30, dtype=np.int32),
                np.zeros(30, np.float32),
            )
    sizes = [sum(len(each) for _, each, _ in kept) for kept in drafts._kept.values()]
    assert sum(sizes) == drafts._size <= 1000
    assert max(sizes) <= 100
    assert ("t", "99") in drafts._kept
    assert ("t", "0") not in drafts._kept


async def test_many_rows_are_not_searched_for(models: dict[str, Path]) -> None:
    epochs = [
        requests(epoch, tasks=1, group=DRAFTED_ROWS + 1, min_new_tokens=30, max_new_tokens=30) for epoch in (0, 1)
    ]
    _, counters = await completed(models["qwen3"], epochs, max_rows=DRAFTED_ROWS + 1)
    assert counters["tokens_drafted"] == 0


def test_threads_share_no_row_and_get_none_alone() -> None:
    for lengths in ([1] * 32, [31, 1], [1, 31], [16, 16], [1, 1, 30], [64], [5, 20, 7], [2, 60, 2]):
        own = np.repeat(np.arange(len(lengths)), lengths)
        for size in (8, 16, 20):
            ends = [0, *_between(own, range(size, len(own), size)), len(own)]
            assert min(np.diff(ends)) > 1
            assert all(own[end - 1] != own[end] for end in ends[1:-1])


def test_a_decoder_that_gives_other_bits_verifies_no_drafts(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.inference_mode():
        decoder = Decoder(models["qwen3"], dtype=torch.float32, device="cpu", exact=True)
        assert verifies_drafts(decoder, 512)
        step = decoder.step
        monkeypatch.setattr(
            decoder,
            "step",
            lambda *given, cache_rows=None: step(*given, cache_rows=cache_rows) * (1 if cache_rows is None else 1.0001),
        )
        assert not verifies_drafts(decoder, 512)
    assert "engine.speculation is off" in caplog.text
