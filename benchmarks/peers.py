"""One GRPO step here and in TRL's GRPOTrainer, alternating in one process on the CPU.

The same model, prompts, group size, response length and precision on both sides. Generation and update are timed apart;
ratios are printed, above 1 where we are faster.

    python -m venv bench && bench/bin/pip install -c constraints.txt -e . trl==1.16.0
    bench/bin/python benchmarks/peers.py --steps 7

Equal token counts, stop rules, dtype and prompts are asserted before a ratio is printed. Both sides forbid the end of
sequence, so that every response has exactly `--new-tokens` tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trivium.algorithms import build_algorithm
from trivium.algorithms.presets import GRPO
from trivium.config import RewardConfig
from trivium.engines.torch import TorchEngine
from trivium.explorer import Explorer
from trivium.loops import train_step
from trivium.randomness import SampleKey
from trivium.rewards.judge import make_judge
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import TinyModel
from trivium.training.engine import TorchTrainEngine
from trivium.types import Group, Message, Sampling, Task
from trivium.workflows.single_turn import SingleTurn

LEARNING_RATE = 1e-4


def variety(prompt: str, completion: str) -> float:
    """The reward on both sides: how many different characters were used."""
    return float(len(set(completion)))


class Ours:
    """Explorer, engine and train engine of Trivium on one model directory."""

    def __init__(self, model_dir: Path, prompts: Sequence[str], args: argparse.Namespace) -> None:
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        renderer = ChatRenderer(tokenizer)
        self.args = args
        self.tasks = [Task(str(i), (Message("user", text),)) for i, text in enumerate(prompts)]
        self.engine = TorchEngine(
            TorchEngine.Config(max_rows=args.prompts * args.group),
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
            self.engine.max_context,
            600.0,
            4096,
        )
        self.algorithm = build_algorithm(GRPO.configure({"kind": "grpo"}))
        self.train = TorchTrainEngine(
            TorchTrainEngine.Config.model_validate(
                {"optimizer": {"lr": LEARNING_RATE, "weight_decay": 0.0, "schedule": "constant"}, "max_grad_norm": 1.0}
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

    def step(self) -> tuple[float, float, int]:
        """(seconds to generate and judge, seconds to update, tokens sampled). Carrying the weights over counts as
        generation."""
        began = time.perf_counter()
        groups = asyncio.run(self._play())
        played = time.perf_counter()
        train_step(self.train, groups, self.algorithm)
        updated = time.perf_counter()
        return played - began, updated - played, sum(len(turn.tokens) for group in groups for turn in group.turns())

    async def _play(self) -> list[Group]:
        await self.engine.load(self.train.version, self.train.export_weights())
        return await asyncio.gather(
            *(
                self.explorer.rollout(task, [self._key(task, index) for index in range(self.args.group)])
                for task in self.tasks
            )
        )

    def _key(self, task: Task, index: int) -> SampleKey:
        return SampleKey(0, "bench", "prompts", task.task_id, self.train.version, index)


class Theirs(GRPOTrainer):
    """TRL's trainer with a watch on generation (prompts to scored completions) and a look at what it produced."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.generation_s = 0.0
        self.response_lengths: list[int] = []
        self.prompt_ids: set[tuple[int, ...]] = set()
        super().__init__(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        began = time.perf_counter()
        outputs = super()._generate_and_score_completions(inputs)
        self.generation_s += time.perf_counter() - began
        self.response_lengths = outputs["completion_mask"].sum(-1).tolist()
        for ids, mask in zip(outputs["prompt_ids"], outputs["prompt_mask"], strict=True):
            self.prompt_ids.add(tuple(ids[mask.bool()].tolist()))
        return outputs


class Alternate(TrainerCallback):
    """After each step of theirs, one of ours."""

    def __init__(self, ours: Ours) -> None:
        self.ours = ours
        self.theirs: Theirs | None = None
        self.rows: list[dict[str, float]] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        assert self.theirs is not None
        self.theirs.generation_s = 0.0
        self.began = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        assert self.theirs is not None
        total, generation = time.perf_counter() - self.began, self.theirs.generation_s
        our_generation, our_update, tokens = self.ours.step()
        assert tokens == sum(self.theirs.response_lengths), (tokens, sum(self.theirs.response_lengths))
        self.rows.append(
            {
                "their generation": generation,
                "their update": total - generation,
                "our generation": our_generation,
                "our update": our_update,
            }
        )


def build_theirs(model_dir: Path, prompts: Sequence[str], args: argparse.Namespace, callback: Alternate) -> Theirs:
    rows = args.prompts * args.group
    config = GRPOConfig(
        output_dir=str(model_dir.parent / "trl"),
        use_cpu=True,
        bf16=False,
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
    )
    callback.theirs = theirs
    return theirs


def same_work(ours: Ours, theirs: Theirs, args: argparse.Namespace) -> None:
    """Everything that must be equal before times are compared."""
    assert theirs.response_lengths == [args.new_tokens] * (args.prompts * args.group)
    assert theirs.prompt_ids == ours.prompt_ids
    dtypes = {p.dtype for p in theirs.model.parameters()} | {tensor.dtype for _, tensor in ours.train.export_weights()}
    assert dtypes == {torch.float32}, dtypes
    assert torch.get_num_threads() == args.threads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=7, help="counted steps, after one that is not")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--their-accumulation", type=int, default=1, help="micro-batches of TRL's update")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as directory:
        shape = {"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "mlp": 768, "max_position": 256}
        model_dir = TinyModel(TinyModel.Config.model_validate(shape), seed=0).materialize(Path(directory) / "model")
        prompts = [f"What is {17 * i + 3} plus {29 * i + 11}?" for i in range(args.prompts)]
        ours = Ours(model_dir, prompts, args)
        callback = Alternate(ours)
        theirs = build_theirs(model_dir, prompts, args, callback)
        theirs.train()
        same_work(ours, theirs, args)
        report(callback.rows[1:], ours, args)
        asyncio.run(ours.engine.close())


def report(rows: Sequence[dict[str, float]], ours: Ours, args: argparse.Namespace) -> None:
    parameters = sum(tensor.numel() for _, tensor in ours.train.export_weights())
    print(
        f"{parameters / 1e6:.1f} M parameters, {args.prompts} prompts x {args.group}, {args.new_tokens} new tokens, "
        f"fp32, {args.threads} threads, {len(rows)} steps; batch_invariant={ours.engine.capabilities.batch_invariant}; "
        f"TRL {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
    )
    for name in ("generation", "update", "step"):
        parts = ("generation", "update") if name == "step" else (name,)
        their = [sum(row[f"their {part}"] for part in parts) for row in rows]
        our = [sum(row[f"our {part}"] for part in parts) for row in rows]
        ratios = np.array(their) / np.array(our)
        print(
            f"{name:>10}: TRL {statistics.median(their):6.2f} s   Trivium {statistics.median(our):6.2f} s   "
            f"ratio {np.median(ratios):.2f} (min {ratios.min():.2f}, max {ratios.max():.2f})"
        )


if __name__ == "__main__":
    main()
