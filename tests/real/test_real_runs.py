"""One run of GRPO with LoRA on the real model, and everything that must repeat it to the byte: after a kill, with two
explorers in other shells, on Ray, and in a replay."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.e2e.killing import launches
from tests.e2e.ray_parts import ray_instance, run_command
from tests.e2e.test_kill import outcome_of
from tests.processes import commands
from tests.real.sections import REWARD, assert_same_model_samples_and_trains, changed, metrics_of, questions, written
from trivium.inspection.rollouts import read_rollouts
from trivium.models.backbone.load import load_lm

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

GSM8K = {
    "kind": "jsonl",
    "path": str(Path(__file__).parents[1] / "data" / "gsm8k" / "test.jsonl"),
    "template": "{question} Answer with the number alone.",
    "answer_regex": "#### (.+)$",
}
STEPS = 2
NUM_TOKENS = 12


class Ran(NamedTuple):
    config: Path
    dir: Path

    @property
    def checkpoints(self) -> list[Path]:
        return sorted((self.dir / "checkpoints").glob("step-*"))


@pytest.fixture(scope="module")
def ran(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The run that nothing interrupts, in one process."""
    directory = tmp_path_factory.mktemp("whole")
    config = written(
        directory / "run.yaml",
        model,
        tasks={"train": questions(directory)},
        rewards=[REWARD],
        algorithm="grpo",
        engine={"sampling": {"max_new_tokens": NUM_TOKENS}},
        schedule={"steps": STEPS, "groups_per_step": 2, "group_size": 4},
        checkpoint={"save_every": 1, "keep": 2},
    )
    assert launches(config, directory / "run") == ["finished"]
    return Ran(config, directory / "run")


@pytest.fixture(scope="module")
def expected(ran: Ran) -> dict[str, Any]:
    outcome = outcome_of(ran.dir)
    assert any("policy-adapter" in name for name in outcome["tensors"])
    return outcome


def test_grpo_trains_an_adapter_on_what_the_engine_samples(ran: Ran, model: Path) -> None:
    steps = metrics_of(ran.dir)
    assert [step["step"] for step in steps] == [*range(1, STEPS + 1)]
    assert_same_model_samples_and_trains(steps)
    assert all(step["rollout/failed"] == 0 for step in steps)
    names = changed(model, ran.checkpoints[-1] / "policy")
    assert {name.split(".")[-2] for name in names} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }
    assert len(names) == 7 * 30


def test_an_exported_model_computes_the_log_probs_that_the_engine_sampled_with(ran: Ran, tmp_path: Path) -> None:
    """The engine got the adapter from the trainer; plain transformers reads the weights after step 1."""
    exported = tmp_path / "model"
    with commands(tmp_path) as start:
        start("export", "export", str(ran.dir), str(exported), "--step", "1").ended()
    model: Any = load_lm(exported, dtype=torch.float32)
    compared = 0
    for rollout in read_rollouts(ran.dir, step=2):
        [sequence] = rollout.sequences
        tokens = torch.from_numpy(sequence.tokens.astype(np.int64))
        with torch.no_grad():
            log_probs = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0].numpy()
        sampled = sequence.response_mask
        assert set(sequence.policy_version[sampled].tolist()) == {1}
        np.testing.assert_allclose(sequence.log_prob[sampled], log_probs[sampled[1:]], atol=2e-4)
        compared += int(sampled.sum())
    assert compared > 4 * NUM_TOKENS


def test_a_chat_with_the_model_and_with_the_run_is_answered(ran: Ran, model: Path, tmp_path: Path) -> None:
    with commands(tmp_path) as start:
        chat = ("chat", str(model), str(ran.dir), "--prompt", "What is the capital of France?", "--max-new-tokens", "8")
        text = start("chat", *chat).ended().text
    before, after = text.split(f"[{ran.dir} step {STEPS}]\n")
    assert "Paris" in before
    assert after.strip()


def test_a_run_that_is_killed_ends_with_the_same_bytes(ran: Ran, expected: dict[str, Any], tmp_path: Path) -> None:
    kill = ("update: step taken, no version", 2)
    assert launches(ran.config, tmp_path / "run", [kill]) == [kill[0], "finished"]
    assert "continuing from step-" in (tmp_path / "run" / "log.txt").read_text()
    assert outcome_of(tmp_path / "run") == expected


def test_a_replay_finds_no_difference(ran: Ran, tmp_path: Path) -> None:
    """The step is sampled again, and trained again, from the checkpoint before it."""
    with commands(tmp_path) as start:
        command = start("replay", "replay", str(ran.dir), "--step", str(STEPS), "--update").ended()
    assert "everything compared is equal" in command.text
    assert "need not be equal" not in command.text


def test_two_explorers_over_sqlite_train_the_same_weights(ran: Ran, expected: dict[str, Any], tmp_path: Path) -> None:
    shared = ("run", str(ran.config), f"run.dir={tmp_path / 'run'}", "run.name=apart", "sync.method=checkpoint")
    over = (*shared, f"buffer={{kind: sql, url: 'sqlite:///{tmp_path / 'buffer.db'}'}}")
    with commands(tmp_path) as start:
        explorers = [start(name, *over, "run.mode=explore", f"run.explorer={name}") for name in "ab"]
        trainer = start("train", *over, "run.mode=train")
        for command in (trainer, *explorers):
            command.ended(seconds=600)
    outcome = outcome_of(tmp_path / "run")
    # The channel keeps the versions that an explorer may still ask for.
    outcome["tensors"] = {name: held for name, held in outcome["tensors"].items() if "/versions/" not in name}
    assert outcome == expected


def test_on_ray_the_weights_are_the_same(ran: Ran, expected: dict[str, Any], tmp_path: Path) -> None:
    with ray_instance(tmp_path) as address:
        run = run_command(tmp_path / "run", str(ran.config), "cluster.kind=ray", f"cluster.address={address}")
    assert run.code == 0, run.said
    assert outcome_of(tmp_path / "run") == expected


def test_pass_at_k_of_gsm8k_is_that_of_its_rollouts(ran: Ran, tmp_path: Path) -> None:
    """Of the rollouts that it saves, in 16 tasks: every choice of k of the samples counts. So small a model hardly
    solves one, so a completion with any number passes."""
    saved, samples, k = tmp_path / "rollouts.jsonl", 4, 2
    sampling = {"temperature": 0.7, "max_new_tokens": NUM_TOKENS}
    evaluation = {"taskset": "test", "samples": samples, "k": [1, k, samples], "sampling": sampling, "threshold": 0.5}
    reward = {"kind": "gsm8k", "method": "flexible", "format_score": 0.5}
    sections = {"tasks": {"train": GSM8K, "test": GSM8K}, "rewards": [reward]}
    changes = [f"{name}={json.dumps(value)}" for name, value in {**sections, "evaluation": evaluation}.items()]
    with commands(tmp_path) as start:
        command = ("eval", str(ran.config), "--step", str(STEPS), "--save", str(saved), *changes)
        printed = start("eval", *command).ended().text
    metrics = json.loads(printed[printed.index("{\n") :])
    tasks: dict[str, list[bool]] = {}
    for row in map(json.loads, saved.read_text().splitlines()):
        tasks.setdefault(row["id"], []).append(row["reward"] >= 0.5)
    assert [len(passed) for passed in tasks.values()] == [samples] * 16
    for n in (1, k, samples):
        passed = np.mean([np.mean([any(some) for some in combinations(passed, n)]) for passed in tasks.values()])
        assert metrics[f"eval/test/pass@{n}"] == pytest.approx(passed)
    assert 0 < metrics["eval/test/pass@1"] < metrics[f"eval/test/pass@{k}"] < metrics[f"eval/test/pass@{samples}"]
