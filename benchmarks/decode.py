"""Decoding here and by `model.generate` of transformers, alternating in one process on the CPU; vLLM beside them where
it is installed.

Every side completes the same prompts with the same model, dtype and number of threads, at temperature 1. Lengths have
a long tail: each row ends at a length of its own, and the end of sequence is forbidden, so all sides sample the same
number of tokens, which is asserted before a ratio is printed. Trivium runs with and without batch-invariant arithmetic;
the first against the second is the price of the promise.

    python benchmarks/decode.py --rows 8 64 256 1024
    python benchmarks/decode.py --rows 8 64 256 --model path/to/model    # a Hugging Face directory, not the small model

The floor is what this machine needs at least: the matrix products at the speed of a large product, and each key and
value of a row's own context read once a token, at the speed of a large copy.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from trivium.engines.torch.engine import TorchEngine
from trivium.foundation.randomness import SampleKey, permutation
from trivium.models.cpu.linear import onednn_linear
from trivium.models.cpu.openmp import release_team
from trivium.text.tiny import TinyModel
from trivium.types import IntArray, Request, Sampling

Side = Callable[[list[IntArray], list[int]], int]
"""Completes each prompt with so many tokens; returns how many it sampled."""


def lengths(rows: int, longest: int) -> list[int]:
    """Log-normal: half of the rows end within an eighth of the longest; the longest row is always there."""
    spread = torch.distributions.Normal(0.0, 1.0).icdf((torch.arange(rows) + 0.5) / rows)
    tail = (longest / 8 * torch.exp(spread)).clamp(1, longest).long()
    tail[-1] = longest
    return tail[torch.from_numpy(permutation(rows, "benchmark", "lengths"))].tolist()


class Ours:
    """The torch engine, called as workflows call it: one coroutine for each completion."""

    def __init__(self, model_dir: Path, *, invariant: bool, args: argparse.Namespace) -> None:
        self.calls = 0
        """A part of the keys: each call samples other completions."""
        self.engine = TorchEngine(
            TorchEngine.Config(batch_invariant=invariant, max_rows=args.max_rows, dtype=args.dtype),
            model_dir=model_dir,
            eos_token_ids=frozenset({0}),
            decode=str,
            threads=args.threads,
        )

    def __call__(self, prompts: list[IntArray], limits: list[int]) -> int:
        self.calls += 1

        async def complete() -> int:
            completions = await asyncio.gather(
                *(
                    self.engine.generate(
                        Request(
                            prompt,
                            Sampling(limit, min_new_tokens=limit),
                            SampleKey(0, "bench", "decode", str(row), self.calls),
                        )
                    )
                    for row, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
                )
            )
            return sum(len(completion.tokens) for completion in completions)

        return asyncio.run(complete())


class OwnLength(StoppingCriteria):
    """Ends each row at a length of its own."""

    eos_token_id = None
    """Its presence makes `generate` fill rows that have ended with the padding token."""

    def __init__(self, ends: Sequence[int]) -> None:
        self.ends = torch.tensor(ends)

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        return self.ends <= input_ids.shape[1]


class Generate:
    """`model.generate` on the whole batch, prompts padded on the left."""

    def __init__(self, model_dir: Path, args: argparse.Namespace) -> None:
        dtype = getattr(torch, args.dtype)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=dtype, attn_implementation="sdpa"
        ).eval()

    def __call__(self, prompts: list[IntArray], limits: list[int]) -> int:
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, -len(prompt) :] = torch.from_numpy(prompt)
            mask[row, -len(prompt) :] = 1
        with torch.inference_mode():
            output = self.model.generate(  # pyright: ignore[reportCallIssue]
                ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                eos_token_id=None,
                pad_token_id=0,
                suppress_tokens=[0],
                max_new_tokens=max(limits),
                stopping_criteria=StoppingCriteriaList([OwnLength([width + limit for limit in limits])]),
            )
        # A row that has ended is filled with the padding token, which is suppressed before.
        return int((output[:, width:] != 0).sum())


class Vllm:
    """vLLM's offline interface on the same CPU."""

    def __init__(self, model_dir: Path, args: argparse.Namespace) -> None:
        from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

        self.params = SamplingParams
        # By default vLLM reserves 92 % of the machine's memory, and fails if other processes use more than the rest.
        limits = {"max_num_seqs": args.max_rows, "gpu_memory_utilization": 0.3}
        self.llm = LLM(str(model_dir), dtype=args.dtype, skip_tokenizer_init=True, **limits)

    def __call__(self, prompts: list[IntArray], limits: list[int]) -> int:
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt.tolist()} for prompt in prompts],
            [self.params(temperature=1.0, max_tokens=limit, ignore_eos=True, detokenize=False) for limit in limits],
            use_tqdm=False,
        )
        return sum(len(output.outputs[0].token_ids) for output in outputs)


def speeds(dtype: torch.dtype) -> tuple[float, float]:
    """(floating point operations, bytes copied) a second, of large tensors."""
    a, big = torch.randn(2048, 2048, dtype=dtype), torch.empty(2**26)
    other = torch.empty_like(big)

    def shortest(function: Callable[[], object]) -> float:
        times = []
        for _ in range(4):
            began = time.perf_counter()
            function()
            times.append(time.perf_counter() - began)
        return min(times)

    product = shortest(lambda: onednn_linear(a, a))
    return 2 * 2048**3 / product, 2 * 4 * 2**26 / shortest(lambda: other.copy_(big))


def floor(model: PreTrainedModel, prompts: Sequence[IntArray], limits: Sequence[int], dtype: torch.dtype) -> float:
    """Seconds that this machine needs at least: prompts read once each, then a token at a time."""
    operations, copied = speeds(dtype)
    config = model.config
    embedding = config.vocab_size * config.hidden_size
    layers = sum(parameter.numel() for parameter in model.parameters()) - embedding
    distinct = {prompt.tobytes(): len(prompt) for prompt in prompts}
    products = 2 * layers * (sum(distinct.values()) + sum(limits)) + 2 * embedding * sum(limits)
    position = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize
    read = sum(
        position * (len(prompt) * limit + limit * (limit + 1) // 2)
        for prompt, limit in zip(prompts, limits, strict=True)
    )
    return products / operations + read / copied


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory; unset, a model of four layers, width 256")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest completion")
    parser.add_argument("--group", type=int, default=8, help="rows of one prompt")
    parser.add_argument("--max-rows", type=int, default=512, help="rows that decode at once here and in vLLM")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeat", type=int, default=3, help="counted runs, after one that is not")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    others = ["generate", "plain", "vllm"]
    parser.add_argument("--without", nargs="*", choices=others, default=[], help="sides that are not measured")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as directory:
        shape = {"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "mlp": 768, "max_position": 1024}
        tiny = TinyModel(TinyModel.Config.model_validate(shape), seed=0)
        model_dir = args.model or tiny.materialize(Path(directory) / "model")
        generate = Generate(model_dir, args)
        sides: dict[str, Side] = {"generate": generate, "plain": Ours(model_dir, invariant=False, args=args)}
        if args.dtype == "float32":
            sides["invariant"] = Ours(model_dir, invariant=True, args=args)
        if find_spec("vllm") is not None:
            sides["vllm"] = Vllm(model_dir, args)
        print(
            f"{args.dtype}, {args.threads} threads, {torch.backends.cpu.get_cpu_capability()}, "
            f"torch {torch.__version__}, "
            f"transformers {transformers.__version__}; 'plain' and 'invariant' are Trivium without and with "
            "engine.batch_invariant"
        )
        for name in args.without:
            sides.pop(name, None)
        for rows in args.rows:
            compare(rows, sides, generate.model, args)


def compare(rows: int, sides: dict[str, Side], model: PreTrainedModel, args: argparse.Namespace) -> None:
    size = model.config.vocab_size
    prompts = [
        np.random.default_rng(row // args.group).integers(1, size, 16 + row // args.group % 17).astype(np.int32)
        for row in range(rows)
    ]
    limits = lengths(rows, args.longest)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(args.repeat + 1):
        for name, side in sides.items():
            began = time.perf_counter()
            release_team()  # else more OpenMP threads than cores slow down the engines of this process
            sampled = side(prompts, limits)
            taken = time.perf_counter() - began
            assert sampled == sum(limits), f"{name} sampled {sampled} tokens instead of {sum(limits)}"
            if turn:
                times[name].append(taken)
    medians = {name: statistics.median(each) for name, each in times.items()}
    ours = medians["invariant" if "invariant" in medians else "plain"]
    parts = "   ".join(f"{name} {median:6.2f} s" for name, median in medians.items())
    ratios = "   ".join(f"{name} / Trivium {median / ours:.2f}" for name, median in medians.items())
    print(
        f"{rows:>5} rows, {sum(limits):>6} tokens: {parts}   floor "
        f"{floor(model, prompts, limits, getattr(torch, args.dtype)):.2f} s   {ratios}",
        flush=True,
    )


if __name__ == "__main__":
    main()
