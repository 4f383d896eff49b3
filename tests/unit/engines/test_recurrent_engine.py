"""The torch engine's rows with recurrent states: each has its own, whatever is read, placed or moved beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hybrid_parts import HYBRIDS, MORE_HYBRIDS, write_hybrid
from training_parts import VOCABULARY

from trivium.engines.torch.decoder import Decoder
from trivium.engines.torch.engine import TorchEngine
from trivium.engines.torch.row_states import StatefulRowCache
from trivium.foundation.randomness import SampleKey
from trivium.models.backbone.packed import pack
from trivium.models.backbone.shape import read_shape
from trivium.models.heads.trained_models import LanguageModel
from trivium.types import Completion, Request, Sampling

CPU = torch.device("cpu")
PROMPTS = [np.random.default_rng(n).integers(3, VOCABULARY, n).astype(np.int32) for n in (33, 40, 36, 48)]
REPLIES = np.random.default_rng(0).integers(3, VOCABULARY, (4, 10))


def decoder_of(directory: Path, dtype: torch.dtype) -> Decoder:
    decoder = Decoder(directory, dtype=dtype, device="cpu", exact=False)
    if dtype == torch.float64 and hasattr(decoder.model, "set_experts_implementation"):
        decoder.model.set_experts_implementation("eager")  # torch has no grouped product in float64
    return decoder


def taught(decoder: Decoder) -> torch.Tensor:
    """(sequences, 10): the log-probabilities of the replies. Rows join others, leave and move on the way."""
    prefixes = decoder.read(PROMPTS)
    logits = [[prefix.logits] for prefix in prefixes]

    def steps(rows: Sequence[int]) -> None:
        for _ in range(5):
            given = [len(logits[i]) - 1 for i in rows]
            where = np.array([len(PROMPTS[i]) + count for i, count in zip(rows, given, strict=True)])
            after = decoder.step(REPLIES[list(rows), given], where)
            for i, row in zip(rows, after, strict=True):
                logits[i].append(row)

    decoder.place([prefixes[1], prefixes[0].alone()], [0, 1])
    steps([1, 0])
    decoder.place(prefixes[2:], [2, 3])
    steps([1, 0, 2, 3])
    decoder.rows.move([2, 3], [0, 1], max(map(len, PROMPTS)) + 5)
    steps([2, 3])
    told = torch.stack([torch.stack(rows[:10]) for rows in logits]).log_softmax(-1)
    return told.gather(2, torch.from_numpy(REPLIES)[..., None])[..., 0]


@pytest.mark.parametrize("name", HYBRIDS)
@torch.inference_mode()
def test_decoding_equals_a_full_forward_pass(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are read in three chunks, each continued by the states of the one before."""
    monkeypatch.setattr("trivium.engines.torch.decoder.PROMPT_CHUNK", 16)
    decoder = decoder_of(write_hybrid(tmp_path, name), torch.float64)
    assert decoder.recurrent
    trainer = LanguageModel(tmp_path, dtype=torch.float64, device=CPU, temperature=1.0)
    many = [np.concatenate(each).astype(np.int32) for each in zip(PROMPTS, REPLIES, strict=True)]
    batch = pack(many)
    expected = torch.stack(
        [rows[-10:] for rows in trainer(batch, torch.arange(len(batch.tokens)))[0].split(batch.lengths)]
    )
    close = 1e-6 if name in ("mamba2", "nemotron_h") else 1e-9  # transformers returns their logits in float32
    torch.testing.assert_close(taught(decoder).double(), expected, rtol=close, atol=close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*HYBRIDS, *MORE_HYBRIDS])
@torch.inference_mode()
def test_the_plan_counts_the_bytes_of_the_states(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    decoder = decoder_of(write_hybrid(tmp_path, name), dtype)
    decoder.place(decoder.read(PROMPTS[:1]), [0])
    assert isinstance(decoder.rows, StatefulRowCache)
    shape, states = read_shape(tmp_path), decoder.rows.states
    assert sum(state[0].nbytes for state in states.values()) == shape.state_bytes(dtype.itemsize)
    assert len(decoder.rows.layers) == shape.keys


async def completions(directory: Path, rows: int, requests: Sequence[Request]) -> list[Completion]:
    """Of an engine with this many rows."""
    config = TorchEngine.Config(batch_invariant=True, max_rows=rows, max_context=64)
    some: dict[str, Any] = {"eos_token_ids": frozenset({1, 2}), "decode": lambda tokens: "", "threads": 1}
    engine = TorchEngine(config, model_dir=directory, **some)
    try:
        return await asyncio.gather(*map(engine.generate, requests))
    finally:
        await engine.close()


@pytest.mark.parametrize("name", ["lfm2", "mamba2", "zamba2", "qwen3_5_text", "falcon_h1"])
async def test_the_other_rows_change_no_bit_of_a_completion(name: str, tmp_path: Path) -> None:
    write_hybrid(tmp_path, name)
    requests = [
        Request(
            PROMPTS[n % 4][: 9 + n % 3],
            Sampling(max_new_tokens=5 + 7 * (n % 4)),
            SampleKey(0, "train", "t", str(n), 0, 0),
        )
        for n in range(9)
    ]
    for one, other in zip(
        await completions(tmp_path, 2, requests), await completions(tmp_path, 9, requests), strict=True
    ):
        assert np.array_equal(one.tokens, other.tokens)
        assert one.log_prob.tobytes() == other.log_prob.tobytes()
