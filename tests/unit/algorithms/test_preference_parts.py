"""Pairs on their way to a loss: what a config may say, what a file's row gives, what the train engine makes of them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from configs import algorithm_problems, with_algorithm
from failing import refused
from preferences import preference, scoring
from training_parts import Parts, make_batch, make_engine, weights, write_model
from transformers import AutoModel, AutoModelForCausalLM

from trivium.algorithms import build_algorithm
from trivium.buffers.files import FileBuffer
from trivium.foundation.errors import ConfigError, DataError
from trivium.models.backbone.packed import pack
from trivium.models.heads.trained_models import ScoreModel, ValueModel
from trivium.schedule import Schedule
from trivium.tasks.files import JsonlTasks
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import tiny_tokenizer
from trivium.types import Group

RENDERER = ChatRenderer(tiny_tokenizer("0123456789+="))

# --------------------------------------------------------------------------- config


FILES = {"buffer": {"kind": "files"}}


@pytest.mark.parametrize("kind", ["dpo", "ipo", "kto", "reward_model"])
def test_pairs_come_from_groups_of_two_or_more_or_from_a_file(kind: str) -> None:
    assert build_algorithm(with_algorithm(kind, group_size=2).algorithm).pairs
    assert with_algorithm(kind, group_size=8)
    assert with_algorithm(kind, sections=FILES, group_size=2)
    assert "the best and the worst of a group" in algorithm_problems(kind, group_size=1)["schedule.group_size"]
    assert list(algorithm_problems(kind, sections=FILES, group_size=8)) == ["schedule.group_size"]
    if kind == "kto":
        assert with_algorithm({"kind": kind, "label": "good"}, sections=FILES, group_size=1)  # rows with a label
        assert list(algorithm_problems({"kind": kind, "label": "good"}, sections=FILES, group_size=2)) == [
            "algorithm.label"
        ]
    else:
        assert "kto" in algorithm_problems(kind, sections=FILES, group_size=1)["schedule.group_size"]


def test_options_reach_the_loss() -> None:
    said = {"kind": "dpo", "pair_loss": {"beta": 0.3, "label_smoothing": 0.1}, "epochs": 2, "mini_batches": 4}
    algorithm = build_algorithm(with_algorithm(said).algorithm)
    (objective,) = algorithm.objectives
    assert objective.pair_loss.keywords == {"beta": 0.3, "label_smoothing": 0.1}
    assert (algorithm.epochs, algorithm.mini_batches, algorithm.needs) == (2, 4, {"ref"})
    (judge,) = build_algorithm(
        with_algorithm({"kind": "reward_model", "score_loss": {"margin": 0.5}}).algorithm
    ).objectives
    assert judge.score_loss.keywords == {"margin": 0.5}
    kto = build_algorithm(with_algorithm("kto").algorithm).objectives[0]
    assert (kto.looks_at, kto.needs) == ({"log_prob"}, {"ref_log_prob", "pair_loss", "pair_gradient"})
    assert objective.looks_at == judge.looks_at == judge.needs == frozenset()


@pytest.mark.parametrize(
    ("algorithm", "said", "where"),
    [
        ({"kind": "dpo", "pair_loss": {"bta": 1}}, {}, "algorithm.pair_loss.bta"),
        ({"kind": "dpo", "pair_loss": {"label_smoothing": 0.5}}, {}, "algorithm.pair_loss.label_smoothing"),
        ({"kind": "dpo", "pair_loss": "trivium.algorithms.preference.losses:hps"}, {}, "algorithm.pair_loss"),
        (
            {"kind": "reward_model", "score_loss": "trivium.algorithms.preference.losses:dpo"},
            {},
            "algorithm.score_loss",
        ),
        ({"kind": "dpo", "policy_loss": "ppo"}, {}, "algorithm.policy_loss"),
        ({"kind": "dpo", "mini_batches": 5}, {"groups_per_step": 4}, "algorithm.mini_batches"),
        ("reward_model", {"sections": {"evaluation": {"taskset": "train"}}}, "evaluation.taskset"),
        (
            "dpo",
            {"sections": {"buffer": {"kind": "files", "completion": "answer"}}, "group_size": 2},
            "buffer.completion",
        ),
        ("sft", {"sections": {"buffer": {"kind": "files", "rejected": "worse"}}, "group_size": 1}, "buffer.rejected"),
    ],
)
def test_what_would_be_ignored_or_cannot_work_is_an_error(algorithm: object, said: dict, where: str) -> None:
    assert list(algorithm_problems(algorithm, **said)) == [where]


OWN = """
from typing import Annotated

from pydantic import Field

from trivium.algorithms import PairInputs, PerPair, pair_loss


@pair_loss(formula="max(0, width - (c - d))", source="here")
def hinge(x: PairInputs, *, width: Annotated[float, Field(gt=0)] = 1.0) -> PerPair:
    gap = x.chosen_log_ratio - x.rejected_log_ratio
    return PerPair((width - gap).clamp(min=0), x.chosen_log_ratio.detach(), x.rejected_log_ratio.detach())


def bare(x):
    return x
"""


def test_a_loss_from_a_file_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    said = {"kind": "dpo", "pair_loss": {"kind": "own.py:hinge", "width": 2.0}}
    (objective,) = build_algorithm(with_algorithm(said, tmp_path).algorithm).objectives
    assert objective.pair_loss.keywords == {"width": 2.0}
    with refused(ConfigError, "algorithm.pair_loss", "@pair_loss"):
        with_algorithm({"kind": "dpo", "pair_loss": "own.py:bare"}, tmp_path)


# --------------------------------------------------------------------------- files


async def rows_of(tmp_path: Path, *rows: dict, group_size: int = 2, **columns: str) -> list[Group]:
    """The groups of one step over a JSONL file of these rows."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    prompt = columns.pop("prompt", "prompt")
    tasks = JsonlTasks(JsonlTasks.Config(kind="jsonl", path=str(path), prompt=prompt), name="train", seed=0)
    schedule = Schedule(
        tasks=tasks,
        seed=0,
        stage=0,
        first_version=0,
        groups_per_step=len(rows),
        group_size=group_size,
        max_staleness=0,
        shuffle=False,
        steps=1,
    )
    buffer = FileBuffer(
        FileBuffer.Config(**columns), schedule=schedule, rollouts=tmp_path, renderer=RENDERER, deadline_s=1
    )
    return await buffer.take(len(rows), 0)


SAID = [{"role": "user", "content": "1+1="}]


PARTS = {"role": "assistant", "content": [{"type": "text", "text": "2", "image": None}]}


@pytest.mark.parametrize(
    "chosen",
    [
        "2",
        [{"role": "assistant", "content": "2"}],
        [*SAID, {"role": "assistant", "content": "2"}],
        [PARTS],
        [{"role": "user", "content": [{"type": "text", "text": "1+1="}]}, PARTS],
    ],
)
async def test_a_row_is_a_pair(chosen: object, tmp_path: Path) -> None:
    for prompt in ("1+1=", SAID):
        (group,) = await rows_of(tmp_path, {"messages": prompt, "chosen": chosen, "rejected": "3"}, prompt="messages")
        better, worse = group.trajectories
        assert (better.index, better.reward, worse.index, worse.reward) == (0, 1.0, 1, 0.0)
        assert (better.completion, worse.completion) == ("2", "3")
        for member in group.trajectories:
            (turn,) = member.turns
            assert RENDERER.decode(turn.tokens) == member.completion
            assert int(turn.tokens[-1]) in RENDERER.eos_token_ids
            assert set(turn.policy_version.tolist()) == {-1}


async def test_the_columns_of_a_pair_have_names(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+1=", "good": "2", "bad": "3"} for n in range(2)]
    groups = await rows_of(tmp_path, *rows, chosen="good", rejected="bad")
    assert [member.completion for group in groups for member in group.trajectories] == ["2", "3", "2", "3"]


@pytest.mark.parametrize(
    "rejected",
    [
        None,
        3,
        [],
        [{"role": "user", "content": "2"}],
        ["2"],
        [{"role": "assistant", "content": None}],
        [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "2"}],
        [*SAID, *SAID, {"role": "assistant", "content": "2"}],
        [{"role": "assistant", "content": [{"type": "image"}, {"type": "text", "text": "2"}]}],
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "1+1="}]}, PARTS],
    ],
)
async def test_a_reply_that_is_none_is_an_error_that_names_the_column(rejected: object, tmp_path: Path) -> None:
    with refused(DataError, "'rejected'"):
        await rows_of(tmp_path, {"prompt": "1+1=", "chosen": "2", "rejected": rejected})


async def test_groups_of_three_are_not_in_a_file(tmp_path: Path) -> None:
    with refused(ConfigError, "groups of 3", "schedule.group_size"):
        await rows_of(tmp_path, {"prompt": "1+1=", "completion": "2"}, group_size=3)


# --------------------------------------------------------------------------- engine


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


BATCH = make_batch((9, 21, 5, 14, 7, 18), masked=(3,), ref_log_prob=-1.0)
OBJECTIVES = {
    "dpo": lambda: preference("dpo", beta=0.5),
    "kto_pair": lambda: preference("kto_pair", beta=0.5),
    "reward_model": lambda: scoring("sigmoid", margin=0.2),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_micro_batches_of_whole_pairs_change_nothing(name: str, model_dir: Path) -> None:
    found = []
    for budget in (1, 40, 10_000):
        objective = OBJECTIVES[name]()
        engine = make_engine(
            model_dir, Parts((objective,)), max_tokens_per_micro_batch=budget, dtype="float64", optimizer={"lr": 0.1}
        )
        batch = BATCH.with_columns(**{what: engine.score(BATCH, what) for what in objective.looks_at})
        metrics = engine.update(objective.role, objective.select(batch, 0), objective)
        found.append((metrics, engine))
    for metrics, _ in found[1:]:
        assert metrics == pytest.approx(found[0][0], rel=1e-9)
    assert found[0][0][f"train/grad_norm/{'reward' if name == 'reward_model' else 'policy'}"] > 0


def test_the_loss_is_what_transformers_says_about_the_two_replies(model_dir: Path) -> None:
    """One step from the reference itself: log 2, and then the gap that the step made, by another road."""
    objective = preference("dpo", beta=0.5)
    engine = make_engine(model_dir, Parts((objective,), frozenset({"ref"})), dtype="float64", temperature=1.0)
    batch = BATCH.select([0, 1, 4, 5])
    batch = batch.with_columns(ref_log_prob=engine.score(batch, "ref"))
    assert engine.update("policy", batch, objective)["train/loss/policy"] == pytest.approx(np.log(2))
    metrics = engine.update("policy", batch, objective)

    reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
    trained = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
    again = make_engine(model_dir, Parts((objective,), frozenset({"ref"})), dtype="float64", temperature=1.0)
    again.update("policy", batch, objective)
    trained.load_state_dict(weights(again), strict=False)
    sums = []
    for model in (trained, reference):
        for e in batch.experiences:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor(e.tokens.copy()).long()[None]).logits[0, :-1]
            log_prob = logits.log_softmax(-1).gather(1, torch.tensor(e.tokens.copy()).long()[1:, None])[:, 0]
            sums.append(float(log_prob[torch.tensor(e.response_mask.copy())[1:]].sum()))
    ratios = [0.5 * (a - b) for a, b in zip(sums[:4], sums[4:], strict=True)]
    gaps = [ratios[0] - ratios[1], ratios[2] - ratios[3]]
    assert metrics["train/loss/policy"] == pytest.approx(sum(np.log1p(np.exp(-gap)) for gap in gaps) / 2, rel=1e-6)
    assert metrics["train/preference_margin"] == pytest.approx(sum(gaps) / 2, rel=1e-6)


def test_a_score_is_read_at_the_token_itself_and_a_value_before_it(model_dir: Path) -> None:
    how = {"dtype": torch.float64, "device": torch.device("cpu"), "seed": 3}
    score, value = ScoreModel(model_dir, **how), ValueModel(model_dir, **how)
    tokens = np.array([5, 9, 4, 11, 7], np.int32)
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(model_dir, dtype=torch.float64)(torch.tensor(tokens).long()[None])
        expected = score.value_head(hidden.last_hidden_state[0]).squeeze(1)
        packed, rows = pack([tokens[:2], tokens], torch.device("cpu")), torch.tensor([1, 3, 4, 6])
        torch.testing.assert_close(score(packed, rows), expected[[1, 1, 2, 4]])
        torch.testing.assert_close(value(packed, rows), expected[[0, 0, 1, 3]])


def test_a_reward_model_comes_back_from_a_checkpoint(model_dir: Path, tmp_path: Path) -> None:
    objective = scoring("logexp")
    engines = [make_engine(model_dir, Parts((objective,))) for _ in range(2)]
    before = weights(engines[0])
    engines[0].update("reward", BATCH, objective)
    engines[0].save(tmp_path)
    engines[1].load(tmp_path)
    after = [engine.update("reward", BATCH, objective) for engine in engines]
    assert after[0] == after[1]
    assert after[0]["train/tokens"] == BATCH.num_response_tokens
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(engines[0]).items())
