"""Decoding and training on a GPU that is emulated: every tensor is on its device, nothing waits for it without need,
and the numbers are those of the CPU."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import prefix_parts
import pytest
import torch
from configs import configured, tiny_model
from emulated_gpu import EmulatedGpu, emulated_gpu
from example_counts import FULL
from moe_parts import batch_of, group_of, sampled, turn_of, write_mixture
from training_parts import Parts, Reinforce, SquaredError, make_batch, make_engine, write_model
from vision_parts import CONVERSATIONS, rolled_out, tiny

from trivium.engines.torch.batch import Batch, Ticket
from trivium.engines.torch.decoder import Decoder
from trivium.engines.torch.selfcheck import check_decoder
from trivium.foundation.randomness import SampleKey
from trivium.models.backbone import packed
from trivium.models.placement import sent, use_deterministic_kernels
from trivium.sync.memory import MemoryChannel
from trivium.text.renderer import renderer_of
from trivium.training import batching
from trivium.training.device import described_machine
from trivium.types import Batch as Experiences
from trivium.types import Completion, Prompt, Request, Sampling

ON_HOST = "to the host trivium/engines/torch/sampling.py"
ROUTES_ON_HOST = "to the host trivium/models/backbone/routing.py"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedGpu]:
    with emulated_gpu(monkeypatch) as device:
        yield device


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), scale=2.0, head_dim=8)


def by_file(waits: Counter[str]) -> dict[str, int]:
    """The counts without line numbers."""
    files = Counter[str]()
    for where, number in waits.items():
        files[where.partition(":")[0]] += number
    return dict(files)


def test_the_emulation_refuses_what_a_gpu_refuses(gpu: EmulatedGpu) -> None:
    here, there = torch.ones(3), torch.ones(3, device="cuda")
    for mix in (lambda: here + there, lambda: there[:2] @ here[:2], lambda: here.index_select(0, there.long())):
        with pytest.raises(RuntimeError, match="same device"):
            mix()
    assert (there * here[0]).tolist() == [1.0] * 3  # a number may be of the CPU
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()
    with pytest.raises(RuntimeError, match="for generator"):
        torch.rand(3, device="cuda", generator=torch.Generator())
    with pytest.raises(NotImplementedError, match="CUDA"):
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*[there.view(1, 1, 1, 3)] * 3)
    gpu.waits.clear()
    assert there.sum() > 0
    assert by_file(gpu.waits) == {"_local_scalar_dense elsewhere": 1}


def test_what_is_sent_is_not_waited_for(gpu: EmulatedGpu) -> None:
    array = np.arange(5)
    tensor = sent(array, torch.device("cuda"))
    array[:] = 0
    assert gpu.waits == {}
    assert tensor.is_cuda
    assert tensor.tolist() == [0, 1, 2, 3, 4]
    assert not sent(array, torch.device("cpu")).is_cuda


HOW: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "min_new_tokens": 3},
    {"top_p": 0.9, "max_new_tokens": 5},
    {"top_k": 5, "min_p": 0.01, "max_new_tokens": 3},
    {},
]


def some_prompts() -> list[Prompt]:
    rng = np.random.default_rng(0)
    return [Prompt(rng.integers(3, 31, 5 + 3 * number).astype(np.int32)) for number in range(len(HOW))]


def decoded(
    model: Path,
    dtype: torch.dtype,
    device: str,
    gpu: EmulatedGpu | None = None,
    prompts: Sequence[Prompt] = (),
    extra: tuple[str, ...] = (),
) -> list[Completion]:
    """Completions of different lengths, some of which end while others go on."""
    prompts = prompts or some_prompts()
    precision = "bfloat16" if gpu is not None and dtype == torch.bfloat16 else "float32"
    with torch.inference_mode():
        decoder = Decoder(model, dtype=dtype, device=device, exact=False, head_precision=precision)
        check_decoder(decoder, 64)
        if extra:
            decoder.record_routing()
        batch = Batch(decoder, 8, frozenset({2}), lambda _: "")
        tickets: list[Ticket] = []
        for number, (prompt, how) in enumerate(zip(prompts, HOW, strict=False)):
            key = SampleKey(0, "train", "t", str(number))
            sampling = Sampling(**{"max_new_tokens": 9, **how}, extra=extra)
            request = Request(prompt.tokens, sampling, key, prompt.media)
            tickets.append(Ticket(request, request.sampling.max_new_tokens, None, key.digest()))
        prefixes = [
            decoder.read([prompt.tokens], [decoder.look(prompt.tokens, prompt.media)])[0]
            for prompt, _ in zip(prompts, HOW, strict=False)
        ]
        finished = batch.admit(tickets, prefixes, 0)
        while batch.live:
            if gpu is not None:
                gpu.waits.clear()
            finished += batch.step(0)
            if gpu is not None:
                assert by_file(gpu.waits) == {ON_HOST: 1, **dict.fromkeys([ROUTES_ON_HOST] if extra else [], 1)}
        done = {id(ticket): completion for ticket, completion in finished}
        decoder.load(decoder.weights())
    return [done[id(ticket)] for ticket in tickets]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decode_step_waits_once_and_samples_as_a_cpu(
    model: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = decoded(model, dtype, "cpu")
    with emulated_gpu(monkeypatch) as gpu:
        actual = decoded(model, dtype, "cuda", gpu)
    kernels = " ".join(gpu.operators)
    assert ("_varlen_attn" in kernels) == (dtype == torch.bfloat16)
    for how, one, other in zip(HOW, expected, actual, strict=True):
        # Logits in bfloat16 tie often: a cut between equal ones keeps a token more, or less.
        near = 0.3 if how.keys() & {"top_p", "top_k", "min_p"} else 0.02
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(one.log_prob, other.log_prob, atol=1e-5 if dtype == torch.float32 else near)


def test_sampling_goes_on_where_kernels_are_to_be_deterministic(
    model: Path, gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preflight asks about the GPU, which initializes CUDA, before the setting is made."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: {"allocation.all.allocated": 0})
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is as before in the end
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    before = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    plain = decoded(model, torch.float32, "cpu")
    try:
        use_deterministic_kernels("train.deterministic_kernels")
        with pytest.raises(RuntimeError, match="deterministic"):
            torch.ones(3, device="cuda").cumsum(0)
        repeated = decoded(model, torch.float32, "cuda", gpu)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = before
    for one, other in zip(plain, repeated, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()


def test_a_driver_without_the_gpus_of_its_ranks_describes_the_machine(tmp_path: Path) -> None:
    """Ray hides all GPUs from an actor that has none of its own."""
    config = configured(run={"dir": str(tmp_path)}, model=tiny_model(), train={"device": "cuda"})
    described = described_machine(config, 1)
    assert described["device"] == "cuda"
    assert ("gpu" in described) == torch.cuda.is_available()


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "qwen3_vl"])
def test_prompts_with_images_are_decoded_as_on_a_cpu(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for sizes of images in transformers' towers waits while a prompt is read, not in a step."""
    path = tiny(tmp_path, family)
    prompts = [renderer_of(path).render([first]) for first, *_ in CONVERSATIONS]
    assert sum(bool(prompt.media) for prompt in prompts) == 3
    expected = decoded(path, torch.float32, "cpu", prompts=prompts)
    with emulated_gpu(monkeypatch) as gpu:
        actual = decoded(path, torch.float32, "cuda", gpu, prompts)
    for one, other in zip(expected, actual, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(one.log_prob, other.log_prob, atol=1e-4)


def test_experts_are_recorded_as_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_mixture(tmp_path, head_dim=8)
    expected = decoded(path, torch.float32, "cpu", extra=("routing",))
    with emulated_gpu(monkeypatch) as gpu:
        actual = decoded(path, torch.float32, "cuda", gpu, extra=("routing",))
    for one, other in zip(expected, actual, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert np.array_equal(one.extra["routing"], other.extra["routing"])
        assert one.extra["routing"][:-1].all()


ENTROPY = Reinforce(entropy_coef=0.1, needs=frozenset({"advantages", "entropy"}))
POLICY = Parts((ENTROPY,), frozenset({"old", "ref", "sum_pi_squared"}))
ACTOR_CRITIC = Parts((ENTROPY, SquaredError()), POLICY.needs | {"values"})


def trained(
    model: Path,
    batch: Experiences,
    folder: Path,
    device: str,
    gpu: EmulatedGpu | None = None,
    *,
    algorithm: Parts = ACTOR_CRITIC,
    **config: Any,
) -> dict[str, Any]:
    """Scores, two updates of each model, a checkpoint, an update of what it holds."""
    few, sees = 2 * max(batch.lengths), any(each.media for each in batch.experiences)
    config["optimizer"] = {"lr": 0.1, "eps": 1.0}  # an update is in proportion to the gradient
    engine = make_engine(model, algorithm, device=device, max_tokens_per_micro_batch=few, **config)
    numbers = dict[str, Any]()
    for what in sorted(algorithm.needs):
        numbers[what] = np.concatenate(engine.score(batch, what))
    for objective in algorithm.objectives:
        waits: list[dict[str, int]] = []
        for limit in (few, 1000):  # several micro-batches, and one
            engine._learner(objective.role).max_tokens = limit
            if gpu is not None:
                gpu.waits.clear()
            numbers[f"{objective.role}/{limit}"] = [*engine.update(objective.role, batch, objective).values()]
            waits += (
                [] if gpu is None else [{k: n for k, n in by_file(gpu.waits).items() if not (sees and in_tower(k))}]
            )
        assert all(each == waits[0] for each in waits), "they do not grow with the number of micro-batches"
        assert all(where.startswith("_local_scalar_dense") for each in waits for where in each)
    channel = MemoryChannel()
    channel.offer(1, engine.offered_weights())
    numbers["weights"] = np.concatenate([tensor.float().numpy().ravel() for _, tensor in channel.collect(1)])
    (folder / device).mkdir()
    engine.save(folder / device, lambda: None)
    engine.load(folder / device)
    numbers["resumed"] = [*engine.update("policy", batch, ENTROPY).values()]
    return numbers


def in_tower(where: str) -> bool:
    """Whether transformers' code of a vision tower waits (its sizes decide how it splits and reorders patches), in the
    pass or in the gradient of such an index."""
    return "transformers, " in where or where.startswith("index")


def case(name: str, folder: Path) -> tuple[Path, Experiences, Parts]:
    """A model, what it is trained on, and how."""
    algorithm = ACTOR_CRITIC
    if name in ("dense", "shared"):
        model = write_model(folder / "model", scale=2.0, head_dim=8)
        batch = make_batch() if name == "dense" else prefix_parts.make_batch()
    elif name == "experts":
        model, prompt = write_mixture(folder / "model", head_dim=8), np.arange(5, 30, dtype=np.int32)
        rollouts = sampled(model, [prompt] * 4, extra=("routing",))
        batch, algorithm = batch_of(group_of(*[[turn_of(prompt, each)] for each in rollouts])), POLICY
    else:
        model = tiny(folder / "model", name, scale=1.5, hidden=64)
        batch = asyncio.run(rolled_out(model))
    rng = np.random.default_rng(0)
    noise = {key: [rng.normal(0.3, 1, len(e)) for e in batch.experiences] for key in ("advantages", "returns")}
    return model, batch.with_columns(**noise), algorithm


EXACT = {"dtype": "float32", "head_precision": "float32"}
HALF = {"dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("dense", {**EXACT, "gradient_checkpointing": True}),
        ("dense", {**HALF, "lora": {"rank": 4}, "frozen_dtype": "bfloat16"}),
        *([("shared", {**EXACT, "share_prefix": True})] if FULL else []),
        ("shared", {**EXACT, "share_prefix": True, "lora": {"rank": 4}, "gradient_checkpointing": True}),
        ("shared", {**HALF, "share_prefix": True}),
        ("experts", {**EXACT, "router_replay": "rollout", "share_prefix": True}),
        ("experts", {**HALF, "router_replay": "rollout", "share_prefix": False}),
        ("llava", EXACT),
        ("llava", {**HALF, "lora": {"rank": 4}}),
        ("qwen2_5_vl", EXACT),
        ("qwen3_vl", {**EXACT, "gradient_checkpointing": True}),
    ],
)
def test_training_waits_for_metrics_alone_and_gives_the_numbers_of_a_cpu(
    name: str, config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch, algorithm = case(name, tmp_path)
    how: dict[str, Any] = {"share_prefix": False, **config, "algorithm": algorithm}
    expected = trained(model, batch, tmp_path, "cpu", **{**how, "head_precision": "float32"})
    with emulated_gpu(monkeypatch) as gpu:
        actual = trained(model, batch, tmp_path, "cuda", gpu, **how)
    is_half = config["dtype"] == "bfloat16"
    assert any("_varlen_attn" in each for each in gpu.operators) == is_half
    for key, numbers in expected.items():
        np.testing.assert_allclose(actual[key], numbers, atol=0.1 if is_half else 1e-4, rtol=0.05, err_msg=key)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("device", "dtype", "reads"), [("cpu", "float32", True), ("cuda", "float32", True), ("cuda", "bfloat16", False)]
)
def test_dense_grids_are_laid_out_once_and_only_for_attention_that_reads_them(
    model: Path, device: str, dtype: str, reads: bool, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's kernel for sequences of any lengths reads neither cells nor masks."""
    calls = Counter[str]()

    def counted(module: Any, name: str) -> None:
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **how: calls.update([name]) or function(*args, **how))

    counted(batching, "pack")
    counted(packed, "tree_rows")
    batch = prefix_parts.make_batch(advantages=0.3)
    with emulated_gpu(monkeypatch) as gpu:
        config: dict[str, Any] = {"dtype": dtype, "head_precision": "float32", "max_tokens_per_micro_batch": 70}
        engine = make_engine(model, device=device, gradient_checkpointing=checkpointing, **config)
        for run in (lambda: engine.score(batch, "old"), lambda: engine.update("policy", batch, Reinforce())):
            calls.clear()
            gpu.copies.clear()
            run()
            assert calls["pack"] > 1
            assert calls["tree_rows"] == (calls["pack"] if reads else 0)
            made = [where for where in gpu.copies if where.startswith("trivium/models/backbone/pack_layout.py")]
            assert len(made) == (3 if reads and device == "cuda" else 0)  # masks, cells, and where each row is
            assert bool(gpu.copies) == (device == "cuda")
