"""engine.kind vllm over several processes: layers split over two workers, and an engine on each rank of torchrun."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from failing import refused

from tests.e2e.test_vllm import asked, parent_of, pytestmark, sharp_model, weights_of
from trivium.engines.vllm.engine import VllmEngine
from trivium.models.backbone.load import load_lm
from trivium.policy import EngineFailure
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import tiny_tokenizer
from trivium.types import Completion, Request

__all__ = ["pytestmark"]
EOS = ChatRenderer(tiny_tokenizer("bytes")).eos_token_ids

REWARD = """
def parity(prompt: str, completion: str) -> float:
    return float(len(completion) % 2)
"""


def workers_of(ancestor: int) -> list[int]:
    """The processes of vLLM's workers below a process."""
    parents = {int(path.parent.name): parent_of(path) for path in Path("/proc").glob("[0-9]*/stat")}

    def below(process: int) -> bool:
        return process == ancestor or (process in parents and below(parents[process]))

    return sorted(p for p in parents if below(p) and b"VLLM::Worker" in Path(f"/proc/{p}/cmdline").read_bytes())


def check(model_dir: Path, version: int, requests: Sequence[Request], completions: Sequence[Completion]) -> None:
    """Against transformers' own forward pass with the whole weights."""
    model: Any = load_lm(model_dir, dtype=torch.float32)
    for request, done in zip(requests, completions, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*request.prompt_tokens.tolist(), *done.tokens.tolist()]])).logits[0]
        logits = logits[len(request.prompt_tokens) - 1 : -1]
        logits[:, sorted(EOS)] = -torch.inf  # it may not end before its last token
        tokens = done.tokens.tolist()
        if request.sampling.temperature == 0:
            assert tokens == logits.argmax(-1).tolist()
        else:
            expected = logits.log_softmax(-1)[range(len(tokens)), tokens].numpy()
            np.testing.assert_allclose(done.log_prob, expected, atol=1e-4)
        assert set(done.policy_version.tolist()) == {version}


async def test_two_workers_split_the_layers_and_sample_as_one(tmp_path: Path) -> None:
    """Before and after new weights, in bucket-sized files, and after a worker was killed; the second death is named."""
    models = [sharp_model(tmp_path / f"model-{seed}", seed) for seed in range(2)]
    config = VllmEngine.Config(device="cpu", dtype="float32", max_rows=16, tensor_parallel_size=2, max_restarts=1)
    how: dict[str, Any] = {"eos_token_ids": EOS, "decode": lambda _: "", "threads": 1}
    engine = VllmEngine(config, model_dir=models[0], **how)
    requests = [
        asked([5, 6, 7], index, temperature=temperature, max_new_tokens=40, min_new_tokens=40)
        for index in range(3)
        for temperature in (0.0, 1.0)
    ]
    try:
        for version, model in enumerate(models):
            if version:
                await engine.load(version, weights_of(model).items())
            check(model, version, requests, await asyncio.gather(*map(engine.generate, requests)))
        assert len(workers_of(os.getpid())) == 2
        for is_allowed in (True, False):
            calls = [asyncio.ensure_future(engine.generate(request)) for request in requests]
            await asyncio.wait(calls, timeout=0.05)
            os.kill(workers_of(os.getpid())[-1], signal.SIGKILL)
            if is_allowed:
                check(models[1], 1, requests, await asyncio.gather(*calls))
                continue
            for call in calls:
                with refused(EngineFailure, "vLLM", "engine.max_restarts"):
                    await call
    finally:
        await engine.close()


def test_each_rank_of_torchrun_has_an_engine(tmp_path: Path) -> None:
    """Both sample, with the weights of the last step."""
    config = {
        "run": {"dir": str(tmp_path / "run")},
        "cluster": {"threads": 1},
        "model": {"kind": "hf", "path": str(sharp_model(tmp_path / "model", 0))},
        "tasks": {"train": {"kind": "arithmetic", "max_operand": 9}},
        "rewards": [{"kind": "parity.py:parity"}],
        "engine": {"kind": "vllm", "device": "cpu", "max_rows": 16, "sampling": {"max_new_tokens": 6}},
        "algorithm": "grpo",
        "train": {"optimizer": {"lr": 1e-2}},
        "schedule": {"steps": 2, "groups_per_step": 4, "group_size": 4},
        "monitors": [{"kind": "jsonl"}],
    }
    (tmp_path / "parity.py").write_text(REWARD, encoding="utf-8")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    command = "-m torch.distributed.run --standalone --nproc-per-node 2 -m trivium run"
    done = subprocess.run(
        [sys.executable, *command.split(), str(tmp_path / "run.yaml")], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    log = "".join(path.read_text() for path in (tmp_path / "run").glob("log*.txt"))
    sampled = re.search(r"this rank sampled (\d+) completions", log)
    assert sampled is not None, log
    assert 0 < int(sampled[1]) < 32
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    differences = [abs(row["mismatch/kl"]) for row in rows if "mismatch/kl" in row]
    assert len(differences) == 2
    assert max(differences) < 1e-6, "an engine samples with weights that were replaced"
