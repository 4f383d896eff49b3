"""The torch engine against transformers, against itself in other company, and against callers who misbehave."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from example_counts import FULL
from failing import refused
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from trivium.engines.torch import layers
from trivium.engines.torch.batch import bucket
from trivium.engines.torch.decoder import Decoder
from trivium.engines.torch.engine import TorchEngine, check_every_layer
from trivium.engines.torch.sampling import RowSampling, sample
from trivium.engines.torch.selfcheck import check_decoder, first_layers
from trivium.foundation.errors import ConfigError, RolloutError, SyncError, TriviumError
from trivium.foundation.randomness import SampleKey
from trivium.models.cpu.worker_threads import with_threads
from trivium.policy import EngineFailure
from trivium.types import Completion, Request, Sampling, StopReason

EOS = frozenset({1, 2})


def build(kind: str, vocab: int = 40, **changes: object) -> PreTrainedModel:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 75,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
    }
    config = AutoConfig.for_model(kind, vocab_size=vocab, **{**sizes, **changes})
    return AutoModelForCausalLM.from_config(config)


def gpt2(vocab: int = 40) -> PreTrainedModel:
    config = AutoConfig.for_model("gpt2", vocab_size=vocab, n_embd=36, n_layer=2, n_head=3, n_positions=256)
    return AutoModelForCausalLM.from_config(config)


MODELS = {
    "qwen3": lambda: build("qwen3"),
    "qwen3-tied": lambda: build("qwen3", tie_word_embeddings=True),
    "qwen3-wide": lambda: build("qwen3", 12007),
    "llama": lambda: build("llama", hidden_size=48, intermediate_size=101, num_key_value_heads=4, head_dim=12),
    "qwen2": lambda: build("qwen2", attention_bias=True),
    "gpt2": gpt2,
    "gpt2-wide": lambda: gpt2(10501),
    "gemma2": lambda: build("gemma2", sliding_window=12),
    "mistral": lambda: build("mistral", sliding_window=9, num_key_value_heads=1),
}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random models on disk, with weights large enough that the distributions are far from uniform."""
    found = {}
    for name, make in MODELS.items():
        torch.manual_seed(7)
        model = make()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(4)
        found[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(found[name])
    return found


def engine_for(
    path: Path, eos: frozenset[int] = EOS, decode=lambda tokens: "", threads=1, **config: object
) -> TorchEngine:
    return TorchEngine(
        TorchEngine.Config.model_validate(config), model_dir=path, eos_token_ids=eos, decode=decode, threads=threads
    )


def request(length: int, index: int = 0, *, prompt_seed: int = 0, vocab: int = 40, **sampling: object) -> Request:
    prompt = np.random.default_rng([prompt_seed, length]).integers(3, vocab, length).astype(np.int32)
    key = SampleKey(3, "train", "t", f"{prompt_seed}-{length}", 0, index)
    return Request(prompt, Sampling(**{"max_new_tokens": 24, **sampling}), key)


def same(a: Completion, b: Completion) -> bool:
    return (
        np.array_equal(a.tokens, b.tokens)
        and a.log_prob.tobytes() == b.log_prob.tobytes()
        and a.stop_reason is b.stop_reason
    )


def forced(path: Path, prompt: Sequence[int], reply: Sequence[int], temperature: float) -> np.ndarray:
    """Log-probabilities of a reply from one forward pass of the untouched model."""
    model = model_at(path)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *reply]])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(reply)[:, None])[:, 0].numpy()


def model_at(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.parametrize("name", MODELS)
async def test_log_probs_are_those_of_a_full_forward_pass(models: dict[str, Path], name: str) -> None:
    engine = engine_for(models[name], frozenset())
    try:
        requests = [
            request(length, temperature=temperature, max_new_tokens=30)
            for length in (1, 16, 17, 50, 130)
            for temperature in (0.5, 1.0, 1.7)
        ]
        for asked, done in zip(requests, await asyncio.gather(*map(engine.generate, requests)), strict=True):
            expected = forced(
                models[name], asked.prompt_tokens.tolist(), done.tokens.tolist(), asked.sampling.temperature
            )
            np.testing.assert_allclose(done.log_prob, expected, atol=1e-4)
            assert done.stop_reason is StopReason.LENGTH
            assert (done.policy_version == 0).all()
    finally:
        await engine.close()


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "gpt2"])
async def test_log_probs_of_the_prompt_are_recorded_where_a_request_asks(models: dict[str, Path], name: str) -> None:
    """They are those at temperature 1, for requests that share a prompt with others, and change no completion."""
    engine = engine_for(models[name], frozenset(), max_rows=3)
    try:
        plain = [request(length, index, temperature=0.7, max_new_tokens=4) for length in (1, 9, 50) for index in (0, 1)]
        scored = [replace(each, sampling=replace(each.sampling, extra=("prompt_log_prob",))) for each in plain]
        mixed = [each for pair in zip(plain[::2], scored[1::2], strict=True) for each in pair]
        alone = await asyncio.gather(*map(engine.generate, plain))
        done = await asyncio.gather(*map(engine.generate, mixed))
        model = model_at(models[name])
        for asked, completion, before in zip(mixed, done, alone, strict=True):
            assert same(completion, before)
            assert [*completion.extra] == [*asked.sampling.extra]
            if completion.extra:
                tokens = torch.from_numpy(asked.prompt_tokens.astype(np.int64))
                with torch.no_grad():
                    log_probs = model(tokens[None]).logits[0, :-1].log_softmax(-1)
                expected = log_probs.gather(1, tokens[1:, None])[:, 0].numpy()
                np.testing.assert_allclose(
                    completion.extra["prompt_log_prob"], [0.0, *expected, 0.0, 0.0, 0.0, 0.0], atol=1e-4
                )
    finally:
        await engine.close()


async def test_log_probs_of_the_prompt_are_refused_for_soft_capped_logits(models: dict[str, Path]) -> None:
    engine = engine_for(models["gemma2"], frozenset())
    try:
        with refused(TriviumError, "final_logit_softcapping", "30.0"):
            await engine.generate(request(9, extra=("prompt_log_prob",)))
    finally:
        await engine.close()


@pytest.mark.parametrize("name", ["qwen3", "llama", "gpt2", "gemma2"])
async def test_greedy_is_what_transformers_generates(models: dict[str, Path], name: str) -> None:
    model, engine = model_at(models[name]), engine_for(models[name], frozenset())
    try:
        for length in (5, 33):
            asked = request(length, temperature=0.0, max_new_tokens=32)
            done = await engine.generate(asked)
            ids = torch.from_numpy(asked.prompt_tokens.astype(np.int64))[None]
            expected = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=32,
                eos_token_id=None,
                pad_token_id=0,
            )
            assert done.tokens.tolist() == expected[0, length:].tolist()
            assert (done.log_prob == 0).all()
    finally:
        await engine.close()


@pytest.mark.parametrize(("name", "threads"), [*((name, 1) for name in MODELS), ("qwen3-wide", 2)])
async def test_company_changes_no_bit(models: dict[str, Path], name: str, threads: int) -> None:
    """The same requests alone, and among random others that start, finish and are replaced around them."""
    probes = [
        request(5),
        request(5, 1),
        request(20, temperature=0.7),
        request(64, top_p=0.8),
        request(30, top_k=5),
        request(90, temperature=1.3, max_new_tokens=70),
    ]
    engine = engine_for(models[name], threads=threads)
    try:
        alone = [await engine.generate(probe) for probe in probes]
    finally:
        await engine.close()
    rng = np.random.default_rng(1)
    for trial in range(4 if FULL else 2 if name == "qwen3" else 1):
        rows, budget = int(rng.integers(1, 30)), int(rng.integers(16, 500))
        engine = engine_for(models[name], threads=threads, max_rows=rows, prefill_tokens=budget)
        try:
            others = [
                request(int(rng.integers(1, 130)), i, prompt_seed=9 + i // 2, max_new_tokens=int(rng.integers(1, 100)))
                for i in range(int(rng.integers(1, 40)))
            ]
            crowd = [*probes, *others]
            order = rng.permutation(len(crowd))
            done = await asyncio.gather(*(engine.generate(crowd[i]) for i in order))
            for position, i in enumerate(order):
                assert i >= len(probes) or same(done[position], alone[i]), (trial, i)
        finally:
            await engine.close()


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_long_company_changes_no_bit(kind: str, tmp_path: Path) -> None:
    """Four query heads for each head of keys: MKL adds 320 values in another order than it does 400."""
    torch.manual_seed(3)
    model = build(kind, num_key_value_heads=1, max_position_embeddings=512)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    model.save_pretrained(tmp_path)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 40, size).astype(np.int32) for size in (270, 400)]
    with torch.inference_mode():
        decoder = Decoder(tmp_path, dtype=torch.float32, device="cpu", exact=True)
        mine, other = (decoder.read([prompt])[0] for prompt in prompts)
        logits: list[torch.Tensor] = []
        for rows in ([mine, mine], [mine, other]):
            decoder.place(rows, range(2))
            positions = np.array([270, 270 if rows[1] is mine else 400])
            logits += [torch.stack([decoder.step(np.full(2, 5), positions + i)[0] for i in range(4)])]
    assert torch.equal(*logits)


def test_few_shapes_are_computed_whatever_is_asked(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU keeps what it compiled for each: 0.6 MiB for each number of rows of one small layer."""
    decoder = Decoder(models["qwen3"], dtype=torch.float32, device="cpu", exact=True)
    shapes, reads, product = set[int](), range(1, 130), layers.invariant_linear

    def counted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        shapes.add(x.numel() // x.shape[-1])
        return product(x, weight, bias)

    monkeypatch.setattr(layers, "invariant_linear", counted)
    prompts = [np.random.default_rng(i).integers(3, 40, 3).astype(np.int32) for i in reads]
    with torch.inference_mode():
        for count in reads:
            prefixes = decoder.read(prompts[:count])
            assert len(prefixes) == count
    assert len(shapes) <= 2 * 41  # tokens of all layers, and the last ones of each prompt
    assert len({bucket(rows) for rows in range(1, 1025)}) == 29


async def test_every_number_of_rows_gives_the_same_bits(models: dict[str, Path]) -> None:
    """1 to 40 rows, exhaustively; ragged lengths make the rows finish one after another."""
    engine = engine_for(models["qwen3"], frozenset())
    try:
        crowd = [request(3 + i % 5, i, max_new_tokens=2 + i % 9) for i in range(40)]
        alone = [await engine.generate(asked) for asked in crowd]
        for count in range(1, len(crowd) + 1):
            done = await asyncio.gather(*map(engine.generate, crowd[-count:]))
            assert all(map(same, done, alone[-count:])), count
    finally:
        await engine.close()


@pytest.mark.parametrize("name", MODELS)
def test_layers_without_modules_are_used_where_they_are_the_models(
    models: dict[str, Path], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = Decoder(models[name], dtype=torch.float32, device="cpu", exact=True)
    assert (decoder.layers is not None) == (name.split("-")[0] in {"llama", "mistral", "qwen2", "qwen3"})
    with torch.inference_mode():
        check_decoder(decoder, 256)
    assert not caplog.text
    if decoder.layers is not None:
        decoder.layers._scale *= 1.1
        with torch.inference_mode():
            check_decoder(decoder, 256)
        assert decoder.layers is None
        assert "slower layers" in caplog.text


def deep(directory: Path, depth: int, **settings: Any) -> Decoder:
    """A decoder of `depth` layers."""
    torch.manual_seed(5)
    build("qwen3", 97, num_hidden_layers=depth, **settings).save_pretrained(directory)
    return Decoder(directory, dtype=torch.float32, device="cpu", exact=True)


def test_the_checks_of_a_start_take_no_longer_for_a_deeper_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted are the layers that are computed, and the rows that a start leaves behind."""
    computed = list[int]()
    for depth in (2, 12):
        decoder, after, calls = deep(tmp_path / str(depth), depth), layers._Layer.after, Counter[int]()

        def counted(layer: Any, x: torch.Tensor, attended: torch.Tensor, after: Any = after, calls: Any = calls) -> Any:
            calls[id(layer)] += 1
            return after(layer, x, attended)

        with monkeypatch.context() as patched, torch.inference_mode(), first_layers(decoder):
            patched.setattr(layers._Layer, "after", counted)
            check_decoder(decoder, 256)
        computed.append(calls.total())
        assert not decoder.rows.layers
        with torch.inference_mode():
            decoder.place(decoder.read([np.arange(3, 9, dtype=np.int32)]), range(1))
        assert len(decoder.rows.layers) == depth
    assert computed[0] == computed[1] > 0


def test_a_start_checks_a_kind_of_layers_that_only_deep_ones_have(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The sixth layer attends to 8 positions; an engine that does not know this differs from there on."""
    types = ["full_attention"] * 5 + ["sliding_attention"] + ["full_attention"] * 6
    settings = {"layer_types": types, "sliding_window": 8, "use_sliding_window": True}
    for wrong in (False, True):
        decoder = deep(tmp_path / str(wrong), 12, **settings)
        assert decoder.layers is not None
        if wrong:
            decoder.layers._every[5].window = None
        with torch.inference_mode(), first_layers(decoder):
            assert len(decoder.layers._layers) == 6
            check_decoder(decoder, 256)
        assert (decoder.layers is None) == wrong == ("slower layers" in caplog.text)


def test_doctor_compares_every_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference of the last of many equal layers, which no start looks for."""
    deep(tmp_path, 4)
    config = TorchEngine.Config(kind="torch", device="cpu")
    assert check_every_layer(config, tmp_path)
    build_layers = layers.Layers.__init__

    def wrong(self: Any, *given: Any, **named: Any) -> None:
        build_layers(self, *given, **named)
        self._every[3].before_mlp = replace(self._every[3].before_mlp, scale=self._every[3].before_mlp.scale * 2)

    monkeypatch.setattr(layers.Layers, "__init__", wrong)
    assert not check_every_layer(config, tmp_path)


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "mistral"])
def test_steps_of_few_operations_change_no_bit(
    models: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits: list[torch.Tensor] = []
    for supported in (True, False):
        decoder = Decoder(models[name], dtype=torch.float32, device="cpu", exact=True)
        assert decoder.layers is not None
        assert decoder.layers.supports_step
        prompts = [np.arange(3, 3 + size, dtype=np.int32) for size in (5, 9, 14)]
        lengths = np.array([len(prompt) for prompt in prompts])
        with monkeypatch.context() as patched, torch.inference_mode():
            patched.setattr(layers.Layers, "supports_step", supported)
            prefixes = [decoder.read([prompt])[0] for prompt in prompts]
            decoder.place(prefixes, range(3))
            logits.append(torch.stack([decoder.step(np.array([7, 8, 9]), lengths + i) for i in range(40)]))
    assert torch.equal(*logits)


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "mistral"])
def test_several_threads_in_each_operation_of_few_rows_change_no_bit(kind: str, tmp_path: Path) -> None:
    """Products and sums that are large enough for two threads; sampled with and without truncation."""
    torch.manual_seed(5)
    build(kind, 12007, hidden_size=256, intermediate_size=2048, max_position_embeddings=1024).save_pretrained(tmp_path)
    torch.set_num_threads(2)
    decoder = Decoder(tmp_path, dtype=torch.float32, device="cpu", exact=True)
    assert decoder.workers is not None
    rng = np.random.default_rng(0)
    with torch.inference_mode():
        check_decoder(decoder, 1024)
        assert decoder.few_rows_threads == 2
        for length in (20, 330, 700) if FULL or kind == "qwen3" else (330,):
            prefix = decoder.read([rng.integers(3, 12007, length).astype(np.int32)])[0]
            for rows in (2, 4, 8, 12, 20, 28):
                decoder.place([prefix] * rows, range(rows), length + 1)
                tokens, random = rng.integers(3, 12007, rows), rng.random(rows)
                truncation = np.where(np.arange(rows) % 2, 0.8, 1).astype(np.float32)
                how = RowSampling(
                    np.full(rows, 0.7, np.float32),
                    truncation,
                    np.where(np.arange(rows) % 3, 0, 50),
                    np.zeros(rows, np.float32),
                    np.zeros(rows, np.bool_),
                    torch.tensor([1]),
                )
                found = list[list[torch.Tensor]]()
                for decoder.few_rows_threads in (1, 2):
                    logits = decoder.step(tokens, np.full(rows, length))
                    with with_threads(decoder.few_rows_threads):
                        found.append([logits.clone(), *sample(logits, random, how)])
                assert all(map(torch.equal, *found)), (length, rows)


@pytest.mark.parametrize("optimized", [True, False])
def test_no_product_is_left_to_the_reference_code_of_onednn(
    models: dict[str, Path], capfd: pytest.CaptureFixture[str], optimized: bool
) -> None:
    """In the check of an engine and in a step. Beside the optimized layers, the modules of the model have parts of
    stacked weights."""
    decoder = Decoder(models["llama"], dtype=torch.float32, device="cpu", exact=True)
    assert decoder.layers is not None
    assert not decoder.model.get_submodule("model.layers.0.self_attn.q_proj").weight.T.is_contiguous()
    decoder.layers = decoder.layers if optimized else None
    with torch.inference_mode(), torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        check_decoder(decoder, 256)
    products = [line for line in capfd.readouterr().out.splitlines() if ",inner_product," in line]
    assert products
    assert not [line for line in products if ",ref" in line]


def test_steps_of_few_rows_use_one_thread_if_more_would_change_bits(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(2)
    product = layers.invariant_linear

    def inexact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return product(x, weight, bias) * (1 + 1e-6 * torch.get_num_threads())

    monkeypatch.setattr(layers, "invariant_linear", inexact)
    decoder = Decoder(models["qwen3"], dtype=torch.float32, device="cpu", exact=True)
    with torch.inference_mode():
        check_decoder(decoder, 256)
    assert decoder.few_rows_threads == 1


def test_packed_weights_follow_what_is_loaded_and_change_no_bit(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_at(models["qwen3"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    model.save_pretrained(tmp_path)

    def logits(decoder: Decoder) -> torch.Tensor:
        prefixes = decoder.read([np.arange(3, 20, dtype=np.int32)])
        decoder.place(prefixes * 2, range(2))
        return torch.stack([decoder.step(np.full(2, 5), np.full(2, 17 + i)) for i in range(3)])

    with torch.inference_mode():
        loaded, fresh = (
            Decoder(path, dtype=torch.float32, device="cpu", exact=True) for path in (models["qwen3"], tmp_path)
        )
        before = logits(loaded)
        loaded.load(model.state_dict().items())
        monkeypatch.setattr("trivium.engines.torch.layers.PACKED_BYTES", 0)
        plain = Decoder(tmp_path, dtype=torch.float32, device="cpu", exact=True)
        assert torch.equal(logits(loaded), logits(fresh))
        assert torch.equal(logits(loaded), logits(plain))
        assert not torch.equal(logits(loaded), before)


def test_rows_keep_their_keys_while_their_room_grows(models: dict[str, Path]) -> None:
    """More rows, more positions and shorter prompts in any order; room is made a few times, not at every page."""
    decoder = Decoder(models["qwen3"], dtype=torch.float32, device="cpu", exact=True)
    rng = np.random.default_rng(0)
    with torch.inference_mode():
        long, short = (decoder.read([rng.integers(3, 40, size).astype(np.int32)])[0] for size in (150, 5))
        decoder.place([long, long], [0, 1], 700)
        kept = [tensor[0, :, :150].clone() for tensor in decoder.rows.layers[0]]
        sizes = set()
        decoder.place([short] * 9, range(2, 11), 700)
        for position in range(150, 699):
            decoder.step(np.full(11, 7), np.full(11, position))
            sizes.add(decoder.rows.length)
    assert all(
        torch.equal(tensor[0, :, :150], before) for tensor, before in zip(decoder.rows.layers[0], kept, strict=True)
    )
    assert sizes == {160, 320, 640, 704}


def test_a_prompt_that_waits_for_rows_keeps_no_others_in_memory(models: dict[str, Path]) -> None:
    decoder = Decoder(models["qwen3"], dtype=torch.float32, device="cpu", exact=True)
    with torch.inference_mode():
        prefixes = decoder.read([np.array([3 + row, 4, 5], np.int32) for row in range(3)])
        alone = prefixes[1].alone()
        assert alone.alone() is alone
        assert [len(tensor) for layer in alone.cache.layers for tensor in layer] == [1] * 2 * len(alone.cache.layers)
        steps = []
        for prefix in (prefixes[1], alone):
            decoder.place([prefix], [0])
            steps.append(decoder.step(np.array([7]), np.array([3])))
    assert torch.equal(*steps)
    assert torch.equal(prefixes[1].logits, alone.logits)
    assert alone.logits.untyped_storage().nbytes() < prefixes[1].logits.untyped_storage().nbytes()


@pytest.mark.parametrize("name", MODELS)
def test_prompts_that_are_read_whole_without_a_mask_give_the_same(
    models: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: windows and soft-capping included."""
    monkeypatch.setattr("trivium.engines.torch.attention._PIECE", 64)
    decoder = Decoder(models[name], dtype=torch.float32, device="cpu", exact=False)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 40, length).astype(np.int32) for length in (140, 158)]
    with torch.inference_mode():
        pieces = decoder.read(prompts)
        decoder.reads_whole = True
        whole = decoder.read(prompts)
    for one, other, prompt in zip(pieces, whole, prompts, strict=True):
        torch.testing.assert_close(one.logits, other.logits, rtol=1e-4, atol=1e-3)
        for kept, again in zip(one.cache.layers[-1], other.cache.layers[-1], strict=True):
            index = one.index, slice(None), slice(0, len(prompt))
            torch.testing.assert_close(kept[index], again[index], rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_reads_and_decodes_without_the_math_kernel(
    models: dict[str, Path], name: str, dtype: torch.dtype
) -> None:
    prompts = [np.random.default_rng(row).integers(3, 40, 100 + row).astype(np.int32) for row in range(3)]

    def logits(device: str, dtype: torch.dtype) -> torch.Tensor:
        decoder = Decoder(models[name], dtype=dtype, device=device, exact=False)
        prefixes = decoder.read(prompts)
        decoder.place(prefixes, range(3), 120)
        steps = [decoder.step(np.full(3, 5), np.array([100, 101, 102]) + i) for i in range(4)]
        assert decoder.rows.length == 128
        return torch.stack([torch.stack([prefix.logits for prefix in prefixes]), *steps]).cpu().log_softmax(-1)

    with torch.inference_mode():
        expected = logits("cpu", torch.float32)
        with torch.profiler.profile(acc_events=True) as profile:
            actual = logits("cuda", dtype)
    assert not any("attention_math" in event.key for event in profile.key_averages())
    assert float((actual - expected).square().mean().sqrt()) < (0.5 if dtype == torch.bfloat16 else 1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", MODELS)
def test_cuda_graphs_replay_the_steps_of_current_weights_and_rows(models: dict[str, Path], name: str) -> None:
    plain, replayed = (
        Decoder(models[name], dtype=torch.float32, device="cuda", exact=False, cuda_graphs=graphs)
        for graphs in (False, True)
    )
    prompts = [np.random.default_rng(row).integers(3, 40, 100 + row).astype(np.int32) for row in range(3)]
    with torch.inference_mode():
        for longest in (120, 300):  # the keys and values move the second time
            for decoder in (plain, replayed):
                decoder.place(decoder.read(prompts), range(3), longest)
            for step in range(6):
                expected, actual = (
                    decoder.step(np.full(3, 5 + step), np.array([100, 101, 102]) + step)
                    for decoder in (plain, replayed)
                )
                torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)
            weights = [(each, 0.9 * weight) for each, weight in plain.weights()]
            for decoder in (plain, replayed):
                decoder.load(weights)
    assert replayed.graphs is not None
    assert replayed.graphs._graphs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_step_that_waits_for_the_host_runs_without_a_graph(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = Decoder(models["qwen3"], dtype=torch.float32, device="cuda", exact=False, cuda_graphs=True)
    assert decoder.graphs is not None
    forward = decoder._forward

    def waits(*inputs: Any) -> torch.Tensor:
        logits = forward(*inputs)
        assert float(logits.sum()) != 0
        return logits

    monkeypatch.setattr(decoder, "_forward", waits)
    with torch.inference_mode():
        decoder.place(decoder.read([np.arange(3, 9, dtype=np.int32)] * 2), range(2), 32)
        first, *others = (decoder.step(np.full(2, 5), np.full(2, 6)) for _ in range(3))
    assert "without CUDA graphs" in caplog.text
    for logits in others:
        torch.testing.assert_close(logits, first)
    assert torch.rand(3, device="cuda").isfinite().all()


@pytest.mark.parametrize("name", MODELS)
def test_rounding_is_tolerated_as_measured_and_more_than_it_is_refused(
    models: dict[str, Path], name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In bfloat16, with an output layer that makes differences of more than half a nat."""
    model = AutoModelForCausalLM.from_pretrained(models[name])
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(4)
    model.save_pretrained(tmp_path)
    decoder = Decoder(tmp_path, dtype=torch.bfloat16, device="cpu", exact=False)
    with torch.inference_mode():
        check_decoder(decoder, 256)
        assert not caplog.text
        if decoder.layers is not None:
            decoder.layers._scale *= 1.5
            check_decoder(decoder, 256)
            assert decoder.layers is None
        step = decoder.step

        def late(tokens: np.ndarray, positions: np.ndarray, *more: object) -> torch.Tensor:
            return step(tokens, positions + (positions > 12), *more)

        decoder.step = late
        with refused(ConfigError, type(decoder.model).__name__, "bfloat16"):
            check_decoder(decoder, 256)


async def test_a_cpu_without_bfloat16_is_named_and_uses_the_model_itself(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trivium.models.cpu.linear.available", lambda: False)
    engine = engine_for(models["qwen3"], dtype="bfloat16")
    try:
        assert engine._decoder.layers is None
        assert engine.capabilities.batch_invariant is False
        assert "float32 is faster" in caplog.text
    finally:
        await engine.close()


async def test_a_group_reads_its_prompt_once(models: dict[str, Path]) -> None:
    engine = engine_for(models["qwen3"], max_rows=4)
    try:
        group = [request(40, index) for index in range(16)]
        done = await asyncio.gather(*map(engine.generate, group))
        assert engine.counters["prompts_read"] == 1
        assert len({done.tokens.tobytes() for done in done}) > 1
    finally:
        await engine.close()


async def test_a_finished_row_is_refilled_while_others_go_on(models: dict[str, Path]) -> None:
    engine = engine_for(models["qwen3"], frozenset(), max_rows=2)
    try:
        lengths = (60, 10, 10, 10, 10, 10, 10)
        await asyncio.gather(*(engine.generate(request(4, i, max_new_tokens=n)) for i, n in enumerate(lengths)))
        assert engine.counters["steps"] == 59
        assert engine.counters["tokens_sampled"] == sum(lengths)
    finally:
        await engine.close()


async def test_a_completion_has_its_least_length_and_ends_with_the_context(models: dict[str, Path]) -> None:
    engine = engine_for(models["qwen3"], frozenset(range(5)), max_context=48)
    try:
        full = await engine.generate(request(8, 2, max_new_tokens=16, min_new_tokens=16))
        assert (full.stop_reason, len(full.tokens)) == (StopReason.LENGTH, 16)
        assert (full.tokens >= 5).all()
        cut = await engine.generate(request(40, max_new_tokens=100, min_new_tokens=100))
        assert (cut.stop_reason, len(cut.tokens)) == (StopReason.LENGTH, 8)
    finally:
        await engine.close()


async def test_weights_that_do_not_fit_are_refused_whole(models: dict[str, Path]) -> None:
    engine = engine_for(models["qwen3"])
    try:
        before = await engine.generate(request(6))
        weights = {name: value + 1 for name, value in model_at(models["qwen3"]).state_dict().items()}
        cases = {
            "missing: model.norm.weight": {k: v for k, v in weights.items() if k != "model.norm.weight"},
            "unexpected: model.extra": {**weights, "model.extra": torch.zeros(1)},
            "lm_head.weight (3,)": {**weights, "lm_head.weight": torch.zeros(3)},
        }
        for message, wrong in cases.items():
            with refused(SyncError, message):
                await engine.load(1, wrong.items())
        assert engine.version == 0
        assert same(await engine.generate(request(6)), before)
    finally:
        await engine.close()


async def stepped(engine: TorchEngine, steps: int) -> None:
    """Waits until it has made so many, and looks all the time: completions are over after a few steps more."""
    async with asyncio.timeout(60):
        while engine.counters["steps"] < steps:
            await asyncio.sleep(0)


async def test_cancelling_frees_the_row(models: dict[str, Path]) -> None:
    engine = engine_for(models["qwen3"], frozenset(), max_rows=1)
    try:
        expected = await engine.generate(request(5, max_new_tokens=4))
        long = asyncio.ensure_future(engine.generate(request(5, 1, max_new_tokens=250)))
        waiting = asyncio.ensure_future(engine.generate(request(7, 1, max_new_tokens=250)))
        await stepped(engine, 5)  # the first reply took fewer
        for task in (long, waiting):
            task.cancel()
        async with asyncio.timeout(60):
            assert same(await engine.generate(request(5, max_new_tokens=4)), expected)
        assert engine.counters["tokens_sampled"] == 8
    finally:
        await engine.close()


async def test_a_dead_worker_fails_every_call_and_hangs_none(models: dict[str, Path]) -> None:
    engine = engine_for(models["qwen3"], frozenset(), max_rows=2)
    weights = {name: value * torch.nan for name, value in model_at(models["qwen3"]).state_dict().items()}
    await engine.load(1, weights.items())
    async with asyncio.timeout(60):
        found = await asyncio.gather(*(engine.generate(request(5, i)) for i in range(6)), return_exceptions=True)
        assert all(isinstance(error, EngineFailure) for error in found)
        assert "log-probabilities of policy version 1" in str(found[0])
        assert found[0].__cause__ is not None
        with refused(EngineFailure):
            await engine.generate(request(5))
        with refused(EngineFailure):
            await engine.load(2, weights.items())
        await engine.close()


async def test_rows_that_cannot_be_allocated_fail_those_who_wait_for_them(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request on its way from the queue to a row is nowhere else; its caller must hear of it all the same."""
    engine = engine_for(models["qwen3"], frozenset(), max_rows=4)

    def exhausted(*_: object) -> None:
        raise MemoryError("no room for keys and values")

    monkeypatch.setattr("trivium.engines.torch.kv_cache.RowCache.place", exhausted)
    calls = [engine.generate(request(5 + i % 2, i)) for i in range(10)]
    async with asyncio.timeout(60):
        found = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(error, EngineFailure) for error in found)
    assert all(isinstance(error.__cause__, MemoryError) for error in found)
    await engine.close()


async def test_close_ends_replies_in_progress(models: dict[str, Path]) -> None:
    engine = engine_for(models["qwen3"], frozenset(), max_rows=2)
    running = [asyncio.ensure_future(engine.generate(request(5, i, max_new_tokens=250))) for i in range(4)]
    await stepped(engine, 1)
    await engine.close()
    done = await asyncio.gather(*running)
    assert all(d.stop_reason is StopReason.ABORT for d in done)
    with refused(EngineFailure, "closed"):
        await engine.generate(request(5))
    await engine.close()


async def test_requests_that_cannot_be_served(models: dict[str, Path]) -> None:
    engine = engine_for(models["qwen3"], max_context=30)
    try:
        assert engine.max_context == 30
        for wrong in (
            request(30),
            request(5, max_new_tokens=0),
            replace(request(5), prompt_tokens=np.array([3, 40], np.int32)),
            replace(request(5), prompt_tokens=np.empty(0, np.int32)),
        ):
            with refused(RolloutError):
                await engine.generate(wrong)
        assert len((await engine.generate(request(5))).tokens)
    finally:
        await engine.close()


def test_configs_that_cannot_run(models: dict[str, Path], tmp_path: Path) -> None:
    with refused(ConfigError, "engine.batch_invariant"):
        engine_for(models["qwen3"], dtype="bfloat16", batch_invariant=True)
    with refused(ConfigError, "engine.max_context", 10_000):
        engine_for(models["qwen3"], max_context=10_000)
    build("qwen3", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}).save_pretrained(tmp_path)
    with refused(ConfigError, "rope_type", "engine.batch_invariant"):
        engine_for(tmp_path)
