"""The reader of recorded rollouts: what a run wrote down comes back, token by token, and no file changes."""

from __future__ import annotations

import hashlib
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import episodes
import numpy as np
import pytest
from failing import refused
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from trivium.buffers.journal import write_groups
from trivium.buffers.step_log import StepLog
from trivium.buffers.step_tokens import StepFiles
from trivium.config import config_from_mapping
from trivium.foundation.errors import ConfigError, DataError, RunDirError
from trivium.inspection.rollout_view import decoder, json_of, rollouts_of, text_of
from trivium.inspection.rollouts import Rollout, planned_steps, read_rollouts
from trivium.runtime.launch import run
from trivium.schedule import Schedule
from trivium.types import Batch, Failure, Group, Media, Message, Task, Trajectory, Turn, experiences_of

STEPS, GROUPS, SIZE = 3, 4, 4
CONFIG: dict[str, Any] = {
    "model": {"kind": "tiny", "alphabet": "0123456789+=", "layers": 1, "hidden": 16, "heads": 2, "max_position": 24},
    "cluster": {"threads": 1},
    "tasks": {"train": {"kind": "arithmetic", "max_operand": 9}},
    "rewards": [{"kind": "exact"}, {"kind": "regex", "pattern": "[0-4]", "name": "low"}],
    "algorithm": {"kind": "grpo", "kl": {"coef": 0.01}},
    "engine": {"sampling": {"max_new_tokens": 3}},
    "schedule": {"steps": STEPS, "groups_per_step": GROUPS, "group_size": SIZE},
    "monitors": [{"kind": "jsonl"}],
}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that kept its tokens."""
    path = tmp_path_factory.mktemp("rollouts") / "run"
    run(config_from_mapping({**CONFIG, "run": {"dir": str(path), "keep": "tokens"}}))
    return path


def hashes(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_every_token_comes_back_with_what_the_step_computed_for_it(run_dir: Path) -> None:
    before = hashes(run_dir)
    assert planned_steps(run_dir) == [1, 2, 3]
    for step in planned_steps(run_dir):
        rollouts = list(read_rollouts(run_dir, step=step))
        assert len(rollouts) == GROUPS * SIZE
        for rollout in rollouts:
            assert (rollout.steps, rollout.stage, rollout.greedy) == ((step,), 0, False)
            (sequence,), (turn,) = rollout.sequences, rollout.trajectory.turns
            assert sequence.tokens.tolist() == [*turn.prompt_tokens, *turn.tokens]
            own = np.arange(len(sequence.tokens)) >= len(turn.prompt_tokens)
            assert sequence.response_mask.tolist() == own.tolist()
            assert sequence.log_prob[own].tolist() == turn.log_prob.tolist()
            assert set(sequence.policy_version[own]) == {step - 1}
            assert set(sequence.policy_version[~own]) == {-1}
            assert {"advantages", "returns", "old_log_prob", "ref_log_prob"} <= set(sequence.columns)
            rewards = np.array([member.reward for member in rollout.group.trajectories])
            advantage = (rollout.trajectory.reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
            assert sequence.columns["advantages"] == pytest.approx(np.where(own, advantage, 0), abs=1e-4)
            np.testing.assert_allclose(sequence.columns["old_log_prob"], sequence.log_prob, atol=1e-4)
    assert hashes(run_dir) == before


def test_a_task_and_a_step_select_and_what_there_is_not_is_named(run_dir: Path) -> None:
    rollouts = list(read_rollouts(run_dir))
    assert len(rollouts) == STEPS * GROUPS * SIZE
    task = rollouts[5].group.task.task_id
    chosen = list(read_rollouts(run_dir, task=task))
    assert where(chosen) == where([rollout for rollout in rollouts if rollout.group.task.task_id == task])
    assert {rollout.planned_step for rollout in rollouts_of(run_dir, None, None, False)} == {STEPS}  # the latest
    assert not list(rollouts_of(run_dir, None, None, True))  # none failed
    with refused(RunDirError, "step 9", "1 to 3"):
        list(rollouts_of(run_dir, 9, None, False))
    with refused(RunDirError, "task 'x'"):
        list(rollouts_of(run_dir, None, "x", False))
    with refused(RunDirError, run_dir / "model", "buffer.kind memory"):
        list(read_rollouts(run_dir / "model"))


def test_as_json_and_as_text_it_says_the_same(run_dir: Path) -> None:
    rollout, decode = next(read_rollouts(run_dir, step=2)), decoder(run_dir)
    values = json_of(rollout, decode)
    (sequence,) = values["sequences"]
    assert "".join(sequence["text"]) == decode(sequence["tokens"])
    assert sequence["advantages"] == rollout.sequences[0].columns["advantages"].tolist()
    assert values["turns"][0]["context"].startswith(f"<|user|>{values['prompt'][0]['content']}<|end|>")
    assert values["reward"] == sum(values["rewards"].values())
    text = text_of(rollout, decode, tokens=True)
    assert f"step 2  task {values['task_id']} (train)" in text
    assert len(text.splitlines()) == 6 + len(sequence["tokens"])


def byte_level_bpe(directory: Path, *, in_one_file: bool) -> Any:
    """Saves a byte-level BPE as a run's model, and returns what transformers loads from it."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    backend.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    backend.add_tokens(["<think>"])
    model = directory / "model"
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>").save_pretrained(model)
    if not in_one_file:
        (model / "tokenizer.json").unlink()
        (model / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|end|>"}')
        backend.model.save(str(model))
    (directory / "config.yaml").write_text("model: {kind: tiny}\n")
    return AutoTokenizer.from_pretrained(model)


@pytest.mark.parametrize("in_one_file", [True, False])
def test_tokens_are_decoded_as_transformers_decodes_them(in_one_file: bool, tmp_path: Path) -> None:
    full, chance = byte_level_bpe(tmp_path, in_one_file=in_one_file), random.Random(0)
    decode = decoder(tmp_path)
    assert decode(full("a <|end|>", add_special_tokens=False)["input_ids"]) == "a <|end|>"
    for tokens in [chance.choices(range(len(full)), k=length) for length in range(40)]:
        assert decode(np.array(tokens)) == full.decode(tokens, clean_up_tokenization_spaces=False)


def test_a_database_keeps_rollouts_elsewhere() -> None:
    changed = {"run": {"keep": "tokens"}, "buffer": {"kind": "sql"}, "sync": {"method": "checkpoint"}}
    with refused(ConfigError, "run.keep"):
        config_from_mapping({**CONFIG, **changed})


# --------------------------------------------------------------------------- groups made by hand


def turn(prompt: list[int], tokens: list[int], text: str = "") -> Turn:
    return episodes.turn(prompt, tokens, -1.0, text=text)


def group(slot: int, *members: Trajectory, attempt: int = 0) -> Group:
    task = Task(f"task-{slot}", (Message("user", "?"),))
    return Group(slot, task, members or (Trajectory(0, (turn([1], [2, 3]),), {"r": 1.0}),), attempt=attempt)


def journal(run_dir: Path, name: str, *groups: Group) -> Path:
    path = run_dir / "rollouts" / "stage-0" / f"{name}.msgpack"
    write_groups(path, groups)
    return path


def learn(run_dir: Path, step: int, *groups: Group, advantage: float = 0.0) -> None:
    """What a train step over these groups keeps."""
    batch = Batch(tuple(e for each in groups for member in each.alive for e in experiences_of(each, member)))
    batch = batch.with_columns(advantages=[np.full(len(e), advantage, np.float32) for e in batch.experiences])
    log = StepLog(run_dir, Schedule([], seed=0, groups_per_step=2), {})
    StepFiles(run_dir, log, keeps_updates=True).step(step, groups, batch)


def where(rollouts: list[Rollout]) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(rollout.group.slot, rollout.group.attempt, rollout.steps) for rollout in rollouts]


def test_a_step_shows_what_it_took_and_what_nothing_else_took(tmp_path: Path) -> None:
    """Groups in order of arrival, one replayed, one evicted, one dropped, one that a resumed run replaced."""
    late, again, fresh = group(0), group(1, attempt=1), group(2)
    dropped = replace(group(3), dropped="too short")
    journal(tmp_path, "step-000001", group(1), again, late)
    journal(tmp_path, "step-000002", fresh, dropped)
    journal(tmp_path, "failed", group(2))
    learn(tmp_path, 1, again, fresh, advantage=0.5)
    learn(tmp_path, 2, late, again, advantage=0.75)
    assert where(list(read_rollouts(tmp_path, step=1))) == [(1, 0, (1,)), (1, 1, (1, 2)), (2, 0, (1,))]
    assert where(list(read_rollouts(tmp_path, step=2))) == [(1, 1, (1, 2)), (0, 0, (2,)), (3, 0, (2,))]
    everything = list(read_rollouts(tmp_path))
    assert where(everything)[-1] == (2, 0, ())
    assert [rollout.values_by_step == {} for rollout in everything] == [True, False, False, False, True, True]
    replayed = everything[1]
    assert replayed.sequences[0].columns["advantages"].tolist() == [0.5] * 3  # of the first of its steps
    assert replayed.values_by_step[2][0]["advantages"].tolist() == [0.75] * 3
    learn(tmp_path, 1, again, fresh, advantage=0.25)  # a resumed run trains the step again
    assert next(read_rollouts(tmp_path, task="task-2")).sequences[0].columns["advantages"].tolist() == [0.25] * 3


def test_several_sequences_failures_and_greedy_rollouts_keep_their_places(tmp_path: Path) -> None:
    rewritten = Trajectory(0, (turn([1], [2]), turn([1, 2, 5], [3], "a\x1b[31m"), turn([7], [8, 9])), {"r": 1.0})
    failed = Trajectory(1, (turn([1], [2]),), failure=Failure("reward", "KeyError", "'gone'"))
    greedy = Trajectory(2, (turn([1], [6], 'a <tool_call></think>{"name": "f", "parameters": {}}'),), {"r": 0.0})
    both = replace(group(0, rewritten, failed), greedy=greedy)
    journal(tmp_path, "step-000001", both)
    learn(tmp_path, 1, both, advantage=0.5)
    first, second, third = read_rollouts(tmp_path)
    assert [sequence.tokens.tolist() for sequence in first.sequences] == [[1, 2, 5, 3], [7, 8, 9]]
    assert [len(sequence.columns["advantages"]) for sequence in first.sequences] == [4, 3]
    assert second.values_by_step == {1: ()}
    assert second.sequences[0].columns == {}
    assert (first.greedy, third.greedy, third.values_by_step) == (False, True, {})
    assert [rollout.trajectory.index for rollout in read_rollouts(tmp_path, failed=True)] == [1]
    (thought,) = json_of(third, lambda tokens: "Hm <think>" if list(tokens) == [1] else "")["turns"]
    assert [call["name"] for call in thought["calls"]] == ["f"]
    turns = json_of(first, lambda tokens: "/".join(map(str, tokens)))["turns"]
    assert [each["context"] for each in turns] == ["1", "5", "7"]
    assert [each["fork"] and each["fork"]["at"] for each in turns] == [None, None, 0]
    assert "token 0 is '[7]', and '[1]' in turn 2" in text_of(first, str, tokens=False)
    assert r"a\x1b[31m" in text_of(first, str, tokens=False)  # nothing that a terminal would act on
    assert "failed: reward: KeyError: 'gone'" in text_of(second, str, tokens=True)


def test_pictures_are_shown_by_where_they_are_stored(tmp_path: Path) -> None:
    picture = Media("image/png", b"one picture")
    asked = replace(turn([1, 5], [2]), media=(picture.at(1, 2),))
    answered = replace(turn([1, 5, 2, 5], [3]), media=(picture.at(1, 2), picture.at(3, 4)))
    task = Task("task-0", (Message("user", "look", (picture,)),))
    journal(tmp_path, "step-000001", replace(group(0, Trajectory(0, (asked, answered), {"r": 1.0})), task=task))
    (rollout,) = read_rollouts(tmp_path)
    shown = json_of(rollout, str)
    assert [(message["content"], message["media"][0]["sha256"]) for message in shown["prompt"]] == [
        ("look", picture.sha256)
    ]
    assert [[item["span"] for item in each["media"]] for each in shown["turns"]] == [[[1, 2]], [[3, 4]]]
    assert f"image/png at tokens 3 to 4: media/{picture.sha256}" in text_of(rollout, str, tokens=False)
    assert (tmp_path / "rollouts" / "media" / picture.sha256).read_bytes() == picture.data


def test_a_picture_without_tokens_is_shown_without_a_place(tmp_path: Path) -> None:
    picture = Media("image/png", b"one picture")
    answered = replace(turn([1, 5], [2]), media=(picture,))
    journal(tmp_path, "step-000001", group(0, Trajectory(0, (answered,), {"r": 1.0})))
    (rollout,) = read_rollouts(tmp_path)
    assert f"  image/png: media/{picture.sha256}" in text_of(rollout, str, tokens=False).splitlines()


def test_a_run_in_progress_is_read_and_a_damaged_file_is_not(tmp_path: Path) -> None:
    path = journal(tmp_path, "step-000001", group(0), group(1))
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])  # the last record is being written
    assert where(list(read_rollouts(tmp_path))) == [(0, 0, (1,))]
    assert path.read_bytes() == whole[:-3]
    learn(tmp_path, 1, group(0))
    tokens = tmp_path / "tokens" / "step-000001.safetensors"
    tokens.write_bytes(tokens.read_bytes().replace(b"trivium-tokens-1", b"trivium-tokens-9"))
    with refused(DataError, "trivium-tokens-9"):
        list(read_rollouts(tmp_path))


def test_the_example_of_the_page_runs(run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    page = (Path(__file__).parents[3] / "docs" / "rollouts.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(run_dir.parent)
    exec(code.replace("runs/mine", "run"), {})
    assert capsys.readouterr().out.startswith("[1, 2, 3]\n")
