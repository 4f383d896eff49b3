"""The torch engine on the CPU with and without `engine.speculation`, alternating in one process.

Three kinds of completions: `repeated` samples prompts a second time, in groups, from a model that is fitted to some
questions and answers first; `queue` does so with more prompts than rows, so that rows are used again; `random` samples
from random weights, where nothing repeats. Tokens and log-probabilities of both sides are asserted to be equal to the
bit. Each turn builds new engines, and each engine completes the prompts once before it is measured.

    python benchmarks/speculation.py --questions train.jsonl --rows 2 4 8 16 32

`--questions` is a file of lines with `question` and `answer`, such as GSM8K's. `--fitted` keeps the fitted model in a
directory, for further calls.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import tempfile
import time
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from decode import lengths
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM

from trivium.engines.torch.engine import TorchEngine
from trivium.foundation.randomness import SampleKey, permutation
from trivium.types import Completion, IntArray, Request, Sampling

VOCABULARY, END = 2000, 0
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


def texts(file: Path, number: int) -> tuple[list[IntArray], list[IntArray]]:
    """The tokens of the first questions and answers of a medium length."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<end>"], show_progress=False)
    tokenizer.train_from_iterator((line["question"] + line["answer"] for line in lines), trainer)
    pairs = ((tokenizer.encode(line["question"]).ids, tokenizer.encode("\n" + line["answer"]).ids) for line in lines)
    chosen = list(islice((pair for pair in pairs if 60 <= len(pair[1]) <= 200), number))
    return [np.array(q, np.int32) for q, _ in chosen], [np.array([*a, END], np.int32) for _, a in chosen]


def fit(directory: Path, file: Path, args: argparse.Namespace) -> list[IntArray]:
    """Fits a model to the answers until their log-probability is `-args.nats` a token; returns the questions."""
    questions, answers = texts(file, args.fit)
    if (directory / "config.json").is_file():
        return questions
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SHAPE))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0)
    texts_of = [np.concatenate(pair).astype(np.int64) for pair in zip(questions, answers, strict=True)]
    ordered = sorted(range(len(texts_of)), key=lambda i: len(texts_of[i]))  # batches with little padding
    batches = [ordered[first : first + 8] for first in range(0, len(ordered), 8)]
    epoch, losses = 0, [args.nats]
    while statistics.mean(losses) >= args.nats:
        epoch, losses = epoch + 1, []
        for batch in (batches[i] for i in permutation(len(batches), "fit", epoch)):
            width = max(len(texts_of[i]) for i in batch)
            ids, labels = torch.zeros(len(batch), width, dtype=torch.int64), torch.full((len(batch), width), -100)
            for row, i in enumerate(batch):
                ids[row, : len(texts_of[i])] = torch.from_numpy(texts_of[i])
                labels[row, len(questions[i]) : len(texts_of[i])] = ids[row, len(questions[i]) : len(texts_of[i])]
            loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    print(f"fitted in {epoch} epochs to {statistics.mean(losses):.2f} nats a token", flush=True)
    model.save_pretrained(directory)
    return questions


def engine_for(model_dir: Path, speculation: bool, rows: int, args: argparse.Namespace) -> TorchEngine:
    return TorchEngine(
        TorchEngine.Config.model_validate({"speculation": speculation, "max_rows": rows}),
        model_dir=model_dir,
        eos_token_ids=frozenset({END}),
        decode=str,
        threads=args.threads,
    )


def complete(engine: TorchEngine, prompts: list[IntArray], limits: list[int], epoch: int, args: argparse.Namespace):
    how = {} if args.forced else {"temperature": args.temperature}

    async def every() -> list[Completion]:
        requests = [
            Request(
                prompt,
                Sampling(limit, **how, min_new_tokens=limit if args.forced else 0),
                SampleKey(0, "bench", "speculation", str(i // args.group), epoch, i % args.group),
            )
            for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
        ]
        return await asyncio.gather(*map(engine.generate, requests))

    return asyncio.run(every())


def compare(name: str, rows: int, model_dir: Path, prompts: list[IntArray], limits: list[int], args) -> None:
    sides = (False, True)
    wall: dict[bool, list[float]] = {side: [] for side in sides}
    cpu: dict[bool, list[float]] = {side: [] for side in sides}
    steps: dict[bool, int] = {}
    drafted = accepted = tokens = 0
    nats = 0.0
    for turn in range(args.repeat):
        engines = {side: engine_for(model_dir, side, rows, args) for side in sides}
        for engine in engines.values():
            complete(engine, prompts, limits, 2 * turn, args)
        results, engine = {}, None
        for side in sides if turn % 2 else reversed(sides):
            engine = engines[side]
            before = dict(engine.counters)
            began, began_cpu = time.perf_counter(), time.process_time()
            results[side] = complete(engine, prompts, limits, 2 * turn + 1, args)
            wall[side].append(time.perf_counter() - began)
            cpu[side].append(time.process_time() - began_cpu)
            counted = {key: engine.counters[key] - before[key] for key in before}
            steps[side] = counted["steps"]
            if side:
                drafted, accepted = counted["tokens_drafted"], counted["drafts_accepted"]
        for one, other in zip(results[False], results[True], strict=True):
            assert one.tokens.tobytes() == other.tokens.tobytes(), "other tokens"
            assert one.log_prob.tobytes() == other.log_prob.tobytes(), "other log-probabilities"
        tokens = sum(len(each.tokens) for each in results[True])
        nats = -float(np.concatenate([each.log_prob for each in results[True]]).mean())
        while engines:
            asyncio.run(engines.popitem()[1].close())
        del engine
        gc.collect()  # models refer to themselves
    ratios = [statistics.median(a / b for a, b in zip(each[False], each[True], strict=True)) for each in (cpu, wall)]
    least = [min(each[side]) for each in (cpu, wall) for side in sides]
    print(
        f"{name:>8} {rows:>4} rows {tokens:>6} tokens of {nats:.2f} nats  steps {steps[False]:>4} {steps[True]:>4}  "
        f"accepted {accepted:>5} of {drafted:>5}  CPU {least[0]:.2f} {least[1]:.2f} s  ratio {ratios[0]:.2f}  "
        f"wall {least[2]:.2f} {least[3]:.2f} s  ratio {ratios[1]:.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--fitted", type=Path, help="directory of the fitted model")
    parser.add_argument("--fit", type=int, default=64, help="number of questions")
    parser.add_argument("--nats", type=float, default=0.2, help="loss a token at which fitting ends")
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    parser.add_argument("--kinds", nargs="+", default=["repeated", "queue", "random"])
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--queue", type=int, default=3, help="completions for each row, of `queue`")
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest completion")
    parser.add_argument("--temperature", type=float, default=0.7, help="of the fitted model")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as temporary:
        fitted, plain = args.fitted or Path(temporary) / "fitted", Path(temporary) / "plain"
        questions = fit(fitted, args.questions, args)
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SHAPE)).save_pretrained(plain)
        for kind in args.kinds:
            for rows in args.rows:
                number = rows * (args.queue if kind != "repeated" else 1)
                args.forced = kind == "random"
                prompts = [questions[i // args.group % len(questions)] for i in range(number)]
                limits = lengths(number, args.longest) if args.forced else [args.longest] * number
                compare(kind, rows, plain if args.forced else fitted, prompts, limits, args)


if __name__ == "__main__":
    main()
