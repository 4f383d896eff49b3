"""A run with drafts, killed or not, and one without them end with the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.killing import launches
from tests.e2e.test_kill import outcome_of
from trivium.config import load_config
from trivium.engines.torch.engine import TorchEngine
from trivium.runtime.launch import run

RUN = """
run: {dir: unset, seed: 0}
model: {kind: tiny, alphabet: "0123456789+=", layers: 2, hidden: 32, heads: 4, kv_heads: 2, mlp: 64, max_position: 64}
tasks:
  train: {kind: arithmetic, max_operand: 1}
rewards: [{kind: "slow.py:short"}]
engine: {sampling: {max_new_tokens: 48, temperature: 0.02}}
algorithm: {kind: grpo}
train: {optimizer: {lr: 1.0e-4}}
schedule: {steps: 6, groups_per_step: 2, group_size: 3}
checkpoint: {save_every: 2, keep: 2}
monitors: [{kind: jsonl}]
"""


def test_drafts_change_no_byte_of_a_run_and_kills_change_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = list[TorchEngine]()
    build = TorchEngine.__init__

    def keep(engine: TorchEngine, *given: object, **named: object) -> None:
        build(engine, *given, **named)  # pyright: ignore[reportArgumentType]
        engines.append(engine)

    monkeypatch.setattr(TorchEngine, "__init__", keep)
    config = tmp_path / "run.yaml"
    config.write_text(RUN)
    (tmp_path / "slow.py").write_text((Path(__file__).parent / "slow.py").read_text())
    for way in ("plain", "drafted"):
        run(load_config(config, [f"run.dir={tmp_path / way}", f"engine.speculation={way == 'drafted'}"]))
    plain, drafted = (engine.counters for engine in engines)
    assert plain["tokens_drafted"] == 0
    assert drafted["drafts_accepted"] > drafted["tokens_sampled"] // 4
    assert drafted["steps"] < plain["steps"]
    outcomes = {way: outcome_of(tmp_path / way) for way in ("plain", "drafted")}
    assert outcomes["drafted"] == outcomes["plain"]
    kills = [("put: half a record", 3), ("put: journaled, not counted", 2), ("update: step taken, no version", 1)]
    assert launches(config, tmp_path / "killed", kills)[:-1] == [moment for moment, _ in kills]
    assert outcome_of(tmp_path / "killed") == outcomes["plain"]
