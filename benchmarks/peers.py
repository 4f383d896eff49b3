"""One GRPO step here and in TRL's GRPOTrainer, alternating on the CPU, each side in a process of its own.

The same model, prompts, group size, response length and precision on both sides. Generation and update are timed apart;
ratios are printed, above 1 where we are faster, beside the floor: the arithmetic of a step that computes a shared
prompt once, at the rate of a large matrix product on this machine. CPU seconds and peak memory are those of each
side's process; other programs on the machine change CPU seconds less than seconds.

    python -m venv bench && bench/bin/pip install -c constraints.txt -e '.[peft,data]' trl==1.16.0
    bench/bin/python benchmarks/peers.py --steps 7
    bench/bin/python benchmarks/peers.py --steps 2 --model DIR --lora 16 --prompts 8 --group 8 --new-tokens 24
    bench/bin/python benchmarks/peers.py --steps 7 --dtype bfloat16
    bench/bin/python benchmarks/peers.py --steps 7 --prompts 1 --group 16 --prompt-tokens 1024 --new-tokens 32

Equal token counts, stop rules, dtype and prompts are asserted before a ratio is printed, and the same loss to 1e-3 of
one batch: TRL's first completions, at the weights that both sides start from. Both sides forbid the end of sequence, so
that every response has exactly `--new-tokens` tokens. `--model` is a Hugging Face directory of a chat model; without
it, a tiny model with random weights is trained. With `--dtype bfloat16` both train weights in float32.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trivium.algorithms import build_algorithm
from trivium.algorithms.presets import GRPO
from trivium.config import RewardConfig
from trivium.engines.torch.engine import TorchEngine
from trivium.explorer import Explorer, RolloutLimits
from trivium.foundation.randomness import SampleKey
from trivium.loops import train_step
from trivium.models.backbone.shape import read_shape
from trivium.models.cpu.linear import onednn_linear
from trivium.models.cpu.openmp import release_team
from trivium.planning.choices import micro_batch_tokens
from trivium.planning.model_shape import BYTES
from trivium.rewards.judge import make_judge
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import TinyModel
from trivium.training.batching import prefixes_of
from trivium.training.engine import TorchTrainEngine
from trivium.types import AnyArray, Batch, Experience, Group, Message, Sampling, Task
from trivium.workflows.single_turn import SingleTurn

LEARNING_RATE = 1e-4
CAPS = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY")
"""Environment variables that forbid instructions to a library."""
OWNERS = ("their", "our")
DEADLINE_S = 3600.0
"""The longest wait for our side."""


def variety(prompt: str, completion: str) -> float:
    """The reward on both sides: how many different characters were used."""
    return float(len(set(completion)))


def clock() -> AnyArray:
    """(seconds, CPU seconds of this process)."""
    return np.array([time.perf_counter(), time.process_time()])


def peak_gib() -> float:
    """The largest memory of this process so far. `ru_maxrss` would be at least what the parent had at the start."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 2**20


class Ours:
    """Explorer, engine and train engine of Trivium on one model directory."""

    def __init__(self, model_dir: Path, prompts: Sequence[str], args: argparse.Namespace) -> None:
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        renderer = ChatRenderer(tokenizer)
        self.args = args
        self.tasks = [Task(str(i), (Message("user", text),)) for i, text in enumerate(prompts)]
        self.engine = TorchEngine(
            TorchEngine.Config(max_rows=args.prompts * args.group, dtype=args.dtype),
            model_dir=model_dir,
            eos_token_ids=renderer.eos_token_ids,
            decode=renderer.decode,
            threads=args.threads,
        )
        self.explorer = Explorer(
            self.engine,
            renderer,
            SingleTurn(SingleTurn.Config()),
            make_judge([RewardConfig(kind=f"{__file__}:variety")]),
            Sampling(args.new_tokens, min_new_tokens=args.new_tokens),
            RolloutLimits(600.0, 4096),
        )
        self.algorithm = build_algorithm(GRPO.configure({"kind": "grpo"}))
        weights = read_shape(model_dir).parameters * BYTES["float32"]
        self.train = TorchTrainEngine(
            TorchTrainEngine.Config.model_validate(
                {
                    "dtype": args.dtype,
                    "optimizer": {"lr": LEARNING_RATE, "weight_decay": 0.0, "schedule": "constant"},
                    "max_grad_norm": 1.0,
                    "max_tokens_per_micro_batch": micro_batch_tokens(weights, "cpu", adapter=bool(args.lora)),
                    "lora": {"rank": args.lora, "alpha": args.lora, "push": "adapter"} if args.lora else None,
                }
            ),
            model_dir=model_dir,
            algorithm=self.algorithm,
            temperature=1.0,
            max_response_length=args.new_tokens,
            total_steps=1000,
            seed=0,
            threads=args.threads,
        )
        self.train.prepare()
        self.prompt_ids = {tuple(renderer.render(task.prompt).tokens.tolist()) for task in self.tasks}

    def step(self) -> tuple[AnyArray, AnyArray, int]:
        """(times to generate and judge, times to update, tokens sampled). Carrying the weights over counts as
        generation."""
        began = clock()
        groups = asyncio.run(self._rollouts())
        generated = clock()
        train_step(self.train, groups, self.algorithm)
        release_team()  # as a run does after each update: else the engine shares the cores with this thread's team
        updated = clock()
        tokens = sum(len(turn.tokens) for group in groups for turn in group.turns())
        return generated - began, updated - generated, tokens

    def facts(self) -> dict[str, Any]:
        """What is compared and printed after the last step."""
        weights = [(tensor.dtype, tensor.numel()) for _, tensor in self.train.export_weights()]
        return {
            "prompt_ids": self.prompt_ids,
            "dtypes": {dtype for dtype, _ in weights},
            "parameters": sum(size for _, size in weights),
            "batch_invariant": self.engine.capabilities.batch_invariant,
            "peak_gib": peak_gib(),
        }

    def old_log_probs(self, batch: Batch) -> list[AnyArray]:
        return self.train.score(batch, "old")

    def loss(self, batch: Batch) -> float:
        """That of the next update, were it of this batch."""
        return self.train.measure("policy", batch, self.algorithm.objectives[0])["train/loss/policy"]

    def close(self) -> None:
        asyncio.run(self.engine.close())

    async def _rollouts(self) -> list[Group]:
        await self.engine.load(self.train.version, self.train.offered_weights())
        return await asyncio.gather(
            *(
                self.explorer.rollout(task, [self._key(task, index) for index in range(self.args.group)])
                for task in self.tasks
            )
        )

    def _key(self, task: Task, index: int) -> SampleKey:
        return SampleKey(0, "bench", "prompts", task.task_id, self.train.version, index)


class OurProcess:
    """`Ours` in a process of its own."""

    built: Ours
    """In that process."""

    def __init__(self, *given: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, spawn, initializer=_build, initargs=given)

    def __call__(self, method: str, *given: Any) -> Any:
        return self._pool.submit(_call, method, *given).result(DEADLINE_S)


def _build(*given: Any) -> None:
    OurProcess.built = Ours(*given)


def _call(method: str, *given: Any) -> Any:
    return getattr(OurProcess.built, method)(*given)


class Theirs(GRPOTrainer):
    """TRL's trainer with a watch on generation (prompts to scored completions) and a look at what it produced."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.generation = np.zeros(2)
        """Times of the current step."""
        self.response_lengths: list[int] = []
        self.prompt_ids: set[tuple[int, ...]] = set()
        self.check: Callable[[Theirs, dict[str, torch.Tensor]], None] | None = None
        """Called with the first batch, before any step."""
        super().__init__(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        began = clock()
        outputs = super()._generate_and_score_completions(inputs)
        self.generation += clock() - began
        self.response_lengths = outputs["completion_mask"].sum(-1).tolist()
        for ids, mask in zip(outputs["prompt_ids"], outputs["prompt_mask"], strict=True):
            self.prompt_ids.add(tuple(ids[mask.bool()].tolist()))
        if self.check is not None:
            self.check(self, outputs)
            self.check = None
        return outputs

    def loss(self, outputs: dict[str, torch.Tensor]) -> float:
        """Of a batch as `_generate_and_score_completions` gives it."""
        with torch.no_grad(), self.compute_loss_context_manager():
            return float(self._compute_loss(self.model, outputs))


class SameLoss:
    """Asserts that both sides compute the same loss of their first batch, with advantages that do not cancel and ratios
    that are not 1, some of them clipped."""

    def __init__(self, ours: OurProcess) -> None:
        self.ours = ours
        self.batch: Batch | None = None

    def __call__(self, theirs: Theirs, outputs: dict[str, torch.Tensor]) -> None:
        rng, rows = np.random.default_rng(0), len(outputs["prompt_ids"])
        experiences: list[Experience] = []
        for row in range(rows):
            prompt = outputs["prompt_ids"][row][outputs["prompt_mask"][row].bool()].numpy()
            tokens = np.concatenate([prompt, outputs["completion_ids"][row].numpy()])
            mask = np.arange(len(tokens)) >= len(prompt)
            group = str(hash(prompt.tobytes()))
            experiences.append(Experience(tokens, mask, np.zeros(len(tokens)), np.where(mask, 0, -1), group, row))
        batch = Batch(tuple(experiences))
        advantages = 1.0 + rng.normal(size=rows)
        old = [
            (scored + 0.2 * rng.normal(size=len(scored))) * each.response_mask
            for scored, each in zip(self.ours("old_log_probs", batch), experiences, strict=True)
        ]
        per_token = [value * each.response_mask for value, each in zip(advantages, experiences, strict=True)]
        self.batch = batch.with_columns(advantages=per_token, old_log_prob=old)
        new_tokens = outputs["completion_ids"].shape[1]
        old_grid = torch.tensor(np.stack([each[-new_tokens:] for each in old]), dtype=torch.float32)
        given = {"advantages": torch.tensor(advantages, dtype=torch.float32), "old_per_token_logps": old_grid}
        found, expected = self.ours("loss", self.batch), theirs.loss({**outputs, **given})
        assert abs(found - expected) <= 1e-3 * max(1.0, abs(expected)), (found, expected)
        print(f"the loss of one batch: TRL {expected:.5f}, Trivium {found:.5f}", flush=True)


class Alternate(TrainerCallback):
    """After each step of theirs, one of ours."""

    def __init__(self, ours: OurProcess) -> None:
        self.ours = ours
        self.theirs: Theirs | None = None
        self.rows: list[dict[str, AnyArray]] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        assert self.theirs is not None
        self.theirs.generation = np.zeros(2)
        self.began = clock()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        assert self.theirs is not None
        total, generation = clock() - self.began, self.theirs.generation
        our_generation, our_update, tokens = self.ours("step")
        assert tokens == sum(self.theirs.response_lengths), (tokens, sum(self.theirs.response_lengths))
        self.rows.append(
            {
                "their generation": generation,
                "their update": total - generation,
                "our generation": our_generation,
                "our update": our_update,
            }
        )
        spent = "   ".join(f"{name} {wall:.1f} s ({cpu:.1f})" for name, (wall, cpu) in self.rows[-1].items())
        print(f"step {len(self.rows)}, seconds (CPU seconds): {spent}", flush=True)


def build_theirs(
    model_dir: Path, output_dir: Path, prompts: Sequence[str], args: argparse.Namespace, callback: Alternate
) -> Theirs:
    rows = args.prompts * args.group
    config = GRPOConfig(
        output_dir=str(output_dir),
        use_cpu=True,
        bf16=args.dtype == "bfloat16",
        fp16=False,
        per_device_train_batch_size=rows // args.their_accumulation,
        gradient_accumulation_steps=args.their_accumulation,
        steps_per_generation=args.their_accumulation,
        num_generations=args.group,
        num_iterations=1,
        max_completion_length=args.new_tokens,
        generation_kwargs={"min_new_tokens": args.new_tokens},
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="dapo",
        scale_rewards="group",
        mask_truncated_completions=False,
        activation_checkpointing=False,
        max_steps=args.steps + 1,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=0,
    )

    def reward(completions: Sequence[Any], **columns: Any) -> list[float]:
        return [variety("", completion[0]["content"]) for completion in completions]

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="sdpa")
    theirs = Theirs(
        model=model,
        args=config,
        reward_funcs=reward,
        processing_class=AutoTokenizer.from_pretrained(model_dir),
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in prompts]}),
        callbacks=[callback],
        peft_config=LoraConfig(r=args.lora, lora_alpha=args.lora, target_modules="all-linear") if args.lora else None,
    )
    callback.theirs = theirs
    return theirs


def same_work(facts: dict[str, Any], theirs: Theirs, args: argparse.Namespace) -> None:
    """Everything that must be equal before times are compared."""
    assert theirs.response_lengths == [args.new_tokens] * (args.prompts * args.group)
    assert theirs.prompt_ids == facts["prompt_ids"]
    dtypes = {p.dtype for p in theirs.model.parameters()} | facts["dtypes"]
    assert dtypes == {torch.float32}, dtypes
    assert torch.get_num_threads() == args.threads


def long_enough(prompts: Sequence[str], model_dir: Path, tokens: int) -> list[str]:
    """The prompts, each with words behind it until it has `tokens` tokens, template included."""
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(model_dir))

    def count(text: str) -> int:
        return len(renderer.render((Message("user", text),)).tokens)

    longer: list[str] = []
    for prompt in prompts:
        while count(prompt) < tokens:
            prompt += "123 "[: tokens - count(prompt)] if tokens - count(prompt) < 4 else "123 "
        longer.append(prompt)
    return longer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Hugging Face directory of a chat model; default: a tiny model")
    parser.add_argument("--lora", type=int, default=0, help="rank of an adapter; 0 trains all weights")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=0, help="shortest prompt, its template included")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--steps", type=int, default=7, help="counted steps, after one that is not")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--their-accumulation", type=int, default=1, help="micro-batches of TRL's update")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as directory:
        model_dir = args.model or tiny_model(Path(directory) / "model", args)
        prompts = [f"What is {17 * i + 3} plus {29 * i + 11}?" for i in range(args.prompts)]
        prompts = long_enough(prompts, model_dir, args.prompt_tokens)
        ours = OurProcess(model_dir, prompts, args)
        callback = Alternate(ours)
        theirs = build_theirs(model_dir, Path(directory) / "trl", prompts, args, callback)
        theirs.check = same_loss = SameLoss(ours)
        theirs.train()
        facts = ours("facts")
        same_work(facts, theirs, args)
        assert same_loss.batch is not None
        report(callback.rows[1:], facts, floor_seconds(model_dir, same_loss.batch, args), args)
        ours("close")


def tiny_model(directory: Path, args: argparse.Namespace) -> Path:
    shape = {"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "mlp": 768}
    shape["max_position"] = max(256, 2 * (args.prompt_tokens + args.new_tokens))
    return TinyModel(TinyModel.Config.model_validate(shape), seed=0).materialize(directory)


def floor_seconds(model_dir: Path, batch: Batch, args: argparse.Namespace) -> dict[str, float]:
    """CPU seconds of generation and update at the rate of a large matrix product, with shared tokens computed once."""
    shape, tree = read_shape(model_dir), prefixes_of(batch).tree(range(len(batch)))
    adapted = shape.layers if args.lora else 0
    squares = sum(each.stop**2 - each.first**2 for each in tree.segments)
    sampled = sum(each.num_response_tokens for each in batch.experiences)
    peak = products_per_cpu_second(getattr(torch, args.dtype))
    seconds = {
        name: shape.flops(tree.num_tokens, squares, sampled, backward=name == "update", adapted=adapted) / peak
        for name in ("generation", "update")
    }
    return {**seconds, "step": sum(seconds.values())}


def products_per_cpu_second(dtype: torch.dtype) -> float:
    """Operations of a large matrix product in a second of one core: the best of many runs, of torch and of oneDNN.
    Counted in CPU seconds, since other programs may use the cores."""
    size, seconds = 1536, [float("inf")]
    a = torch.rand(size, size, dtype=dtype)
    torch.set_num_threads(1)
    for multiply in (partial(torch.matmul, a, a), partial(onednn_linear, a, a)) * 10:
        began = time.process_time()
        multiply()
        seconds.append(time.process_time() - began)
    return 2.0 * size**3 / min(seconds)


def cpu() -> str:
    """The processor's name, and its flags that matter for matrix products."""
    lines = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines())
    fields = {key.strip(): value.strip() for key, value in lines.items()}
    flags = [flag for flag in fields.get("flags", "").split() if flag.startswith(("avx", "amx", "fma"))]
    capped = [f"{name}={os.environ[name]}" for name in CAPS if name in os.environ]
    return f"{fields.get('model name', 'unknown')} ({' '.join([*flags, *capped])})"


def report(
    rows: Sequence[dict[str, AnyArray]], facts: dict[str, Any], floors: dict[str, float], args: argparse.Namespace
) -> None:
    print(cpu())
    lengths = sorted(map(len, facts["prompt_ids"]))
    print(
        f"{facts['parameters'] / 1e6:.1f} M parameters, {f'LoRA of rank {args.lora}' if args.lora else 'all trained'}, "
        f"{args.prompts} prompts x {args.group}, {lengths[0]} to {lengths[-1]} + {args.new_tokens} tokens, "
        f"{args.dtype}, {args.threads} threads, {len(rows)} steps; batch_invariant={facts['batch_invariant']}; "
        f"TRL {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
    )
    for name in ("generation", "update", "step"):
        parts = ("generation", "update") if name == "step" else (name,)
        their, our = (np.array([sum(row[f"{whose} {part}"] for part in parts) for row in rows]) for whose in OWNERS)
        for clock_name, theirs, ours in zip(("seconds", "CPU seconds"), their.T, our.T, strict=True):
            floor = floors[name] / (args.threads if clock_name == "seconds" else 1)
            ratios = theirs / ours
            print(
                f"{name:>10}, {clock_name:>11}: TRL {np.median(theirs):7.2f}   Trivium {np.median(ours):7.2f}   "
                f"floor {floor:6.2f}   ratio {np.median(ratios):.2f} (min {ratios.min():.2f}, max {ratios.max():.2f})"
            )
    their_peak, our_peak = peak_gib(), facts["peak_gib"]
    print(f"peak memory: TRL {their_peak:.2f} GiB   Trivium {our_peak:.2f} GiB   ratio {their_peak / our_peak:.2f}")


if __name__ == "__main__":
    main()
