"""Learning from preferences through whole runs: from files and from rollouts, the policy itself or a reward model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import tiny_model
from failing import refused
from safetensors.numpy import load_file

from trivium.config import config_from_mapping, merged
from trivium.foundation.errors import ConfigError
from trivium.foundation.metrics import depends_on_machine
from trivium.models.backbone.packed import pack
from trivium.models.heads.trained_models import ScoreModel
from trivium.runtime.launch import run
from trivium.text import hf_tokenizer
from trivium.text.renderer import ChatRenderer
from trivium.types import Message

BASE: dict[str, Any] = {
    "cluster": {"threads": 1},
    "model": tiny_model(layers=2),
    "train": {"optimizer": {"lr": 1e-2}},
    "monitors": [{"kind": "jsonl"}],
    "algorithm": {"kind": "dpo"},
}
OFFLINE = {
    "buffer": {"kind": "files"},
    "schedule": {"steps": 10, "groups_per_step": 16, "group_size": 2},
    "checkpoint": {"save_every": 4, "keep": 4},
}
ONLINE = {
    "tasks": {"train": {"kind": "arithmetic", "max_operand": 9}},
    "rewards": [{"kind": "regex", "pattern": "^[0-4]", "name": "low"}, {"kind": "regex", "pattern": "[0-9]$"}],
    "engine": {"sampling": {"max_new_tokens": 5, "temperature": 0.7}},
    "train": {"optimizer": {"lr": 1e-3}},
    "schedule": {"steps": 4, "groups_per_step": 8, "group_size": 4},
    "checkpoint": {"save_every": 2, "keep": 4},
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums whose preferred answer is a low number: one column is text, the other one a conversation."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [
        {
            "prompt": f"{a}+{b}=",
            "chosen": str((a + b) % 5),
            "rejected": [{"role": "user", "content": f"{a}+{b}="}, {"role": "assistant", "content": str(9 - a % 3)}],
        }
        for a in range(8)
        for b in range(8)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def train(run_dir: Path, *said: dict[str, Any]) -> dict[str, Any]:
    """Runs in `run_dir`, from whatever is there; the metric rows and the tensors of the last checkpoint."""
    data: dict[str, Any] = BASE
    for change in (*said, {"run": {"dir": str(run_dir)}}):
        data = merged(data, change)
    run(config_from_mapping(data))
    last = max((run_dir / "checkpoints").glob("step-*"))
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        "last": last,
        "rows": [{key: value for key, value in row.items() if not depends_on_machine(key)} for row in rows],
        "tensors": {str(file.relative_to(last)): load_file(file) for file in sorted(last.rglob("*.safetensors"))},
    }


def offline(pairs: Path, kind: str) -> dict[str, Any]:
    return {**OFFLINE, "algorithm": {"kind": kind}, "tasks": {"train": {"kind": "jsonl", "path": str(pairs)}}}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """To the bit."""
    assert one["rows"] == other["rows"]
    assert {n: list(t) for n, t in one["tensors"].items()} == {n: list(t) for n, t in other["tensors"].items()}
    for name, tensors in one["tensors"].items():
        for key, tensor in tensors.items():
            assert tensor.tobytes() == other["tensors"][name][key].tobytes(), (name, key)


@pytest.mark.parametrize("kind", ["dpo", "ipo", "kto", "reward_model"])
def test_pairs_of_a_file_teach_what_was_preferred(kind: str, pairs: Path, tmp_path: Path) -> None:
    done = train(tmp_path / "run", offline(pairs, kind))
    rows = done["rows"]
    if kind == "reward_model":
        assert abs(rows[0]["train/preference_margin"]) < 0.1  # a head near zero
    elif kind == "kto":  # the reference itself, up to rounding
        assert abs(rows[0]["train/preference_margin"]) < 1e-6
    else:
        assert rows[0]["train/preference_margin"] == rows[0]["train/preference_accuracy"] == 0  # the reference itself
    assert rows[-1]["train/preference_margin"] > rows[3]["train/preference_margin"] > 0
    assert rows[-1]["train/preference_accuracy"] > 0.9
    assert rows[-1]["train/preference_chosen"] > rows[-1]["train/preference_rejected"]
    role = "reward" if kind == "reward_model" else "policy"
    assert all(row[f"train/loss/{role}"] > 0 and row[f"train/grad_norm/{role}"] > 0 for row in rows)
    assert [row["rollout/trajectories"] for row in rows] == [32] * 10
    assert all(row["train/tokens"] > 0 for row in rows)


def test_completions_with_a_label_teach_which_are_desirable(tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    rows = [
        {"prompt": f"{a}+{b}=", "completion": str(answer), "good": answer < 5}
        for a in range(8)
        for b in range(8)
        for answer in [(a + b) % 5 if (a + b) % 2 else 9 - a % 3]
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = {**offline(path, "kto"), "schedule": {**OFFLINE["schedule"], "group_size": 1}}
    done = train(tmp_path / "run", {**data, "algorithm": {"kind": "kto", "label": "good"}})["rows"]
    assert [row["rollout/trajectories"] for row in done] == [16] * 10
    assert done[0]["train/preference_chosen"] == done[0]["train/preference_rejected"] == 0  # the reference itself
    assert done[-1]["train/preference_chosen"] > 0 > done[-1]["train/preference_rejected"]
    assert "train/preference_accuracy" not in done[-1]  # no completion has another one to compare with


@pytest.mark.parametrize("kind", ["sft", "dpo", "kto", "reward_model"])
def test_the_loss_over_held_out_rows_is_that_of_an_update_on_them(kind: str, pairs: Path, tmp_path: Path) -> None:
    """Held out are the rows that one step trains on, whole: before it, the loss is the one that it reports."""
    data = offline(pairs, kind)
    data["tasks"] = {**data["tasks"], "same": data["tasks"]["train"]}
    data["evaluation"] = {"held_out": "same", "every": 2}
    data["schedule"] = {"steps": 3, "groups_per_step": 64, "group_size": 1 if kind == "sft" else 2}
    data["buffer"] = {"kind": "files", **({"completion": "chosen"} if kind == "sft" else {})}
    data["checkpoint"] = {"save_every": 2, "keep": 4, "keep_best": "eval/same/loss"}
    done = train(tmp_path / "run", data, {"train": {"optimizer": {"lr": 1e-3}}})
    evaluated = {row["step"]: row for row in done["rows"] if "eval/same/loss" in row}
    trained = {row["step"]: row for row in done["rows"] if "rollout/groups" in row}
    assert list(evaluated) == [0, 2, 3]
    role = "reward" if kind == "reward_model" else "policy"
    for step in (0, 2):
        before = trained[step + 1]
        assert evaluated[step]["eval/same/loss"] == pytest.approx(before[f"train/loss/{role}"], abs=1e-5)
        for name in () if kind == "sft" else ("preference_accuracy", "preference_margin"):
            assert evaluated[step][f"eval/same/{name}"] == pytest.approx(before[f"train/{name}"], abs=1e-5)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["held_out_before"] == {key: evaluated[0][key] for key in summary["held_out_before"]}
    assert (
        summary["held_out_after"]["eval/same/loss"] == evaluated[3]["eval/same/loss"] < evaluated[0]["eval/same/loss"]
    )
    unmeasured = merged(data, {"evaluation": None, "checkpoint": {"keep_best": None}})
    plain = train(tmp_path / "plain", unmeasured, {"train": {"optimizer": {"lr": 1e-3}}})
    assert_same({**plain, "rows": []}, {**done, "rows": []})  # measuring changes no weight
    shutil.rmtree(done["last"])
    (tmp_path / "run" / "log.txt").unlink()
    assert_same(train(tmp_path / "run", data, {"train": {"optimizer": {"lr": 1e-3}}}), done)
    assert "continuing from step-000002" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"evaluation": {"held_out": "tset"}}, "evaluation.held_out"),
        ({"evaluation": {"held_out": "train"}, "buffer": {"kind": "memory"}}, "evaluation.held_out"),
        ({"evaluation": {"held_out": "train", "samples": 2}}, "evaluation.samples"),
        ({"evaluation": {"held_out": "train"}, "checkpoint": {"keep_best": "eval/train/los"}}, "checkpoint.keep_best"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes: dict[str, Any], where: str, pairs: Path) -> None:
    with refused(ConfigError, where):
        config_from_mapping(merged(merged(BASE, offline(pairs, "dpo")), {"rewards": ["exact"], **changes}))


@pytest.mark.parametrize("kind", ["dpo", "kto", "reward_model"])
def test_the_best_and_the_worst_of_a_group_are_a_pair(kind: str, tmp_path: Path) -> None:
    rows = train(tmp_path / "run", ONLINE, {"algorithm": {"kind": kind, "mini_batches": 2}})["rows"]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert row["rollout/groups"] == 8
        assert row["rollout/trajectories"] == 2 * (8 - row["rollout/refused"]) > 0
        assert row["rollout/staleness_max"] == 0
        assert row["reward/equal_groups"] == row["rollout/refused"] / 8
    assert rows[0]["train/preference_margin"] != 0  # the second mini-batch has moved off the reference
    if kind == "reward_model":
        assert len({row["reward/mean"] for row in rows}) > 1


def test_a_run_over_rollouts_continues_with_the_same_bits(tmp_path: Path) -> None:
    whole = train(tmp_path / "run", ONLINE)
    shutil.rmtree(whole["last"])
    (tmp_path / "run" / "log.txt").unlink()
    assert_same(train(tmp_path / "run", ONLINE), whole)
    assert "continuing from step-000002" in (tmp_path / "run" / "log.txt").read_text()


def test_a_reward_model_is_saved_with_its_head_and_the_policy_is_left_alone(pairs: Path, tmp_path: Path) -> None:
    done = train(tmp_path / "run", offline(pairs, "reward_model"))
    (initial,) = [load_file(file) for file in (tmp_path / "run" / "model").glob("*.safetensors")]
    policy = done["tensors"]["policy/model.safetensors"]
    assert all(policy[name].tobytes() == tensor.tobytes() for name, tensor in initial.items())
    assert "reward-optimizer.safetensors" in done["tensors"]
    assert "policy-optimizer.safetensors" not in done["tensors"]

    model = ScoreModel(done["last"] / "reward", dtype=torch.float32, device=torch.device("cpu"), seed=1)
    renderer = ChatRenderer(hf_tokenizer(str(tmp_path / "run" / "model")))

    def score(reply: str) -> float:
        prompt, tokens = renderer.expert([Message("user", "3+4=")], reply)
        whole = torch.tensor([*prompt.tokens, *tokens])
        with torch.no_grad():
            said = model(pack([whole.numpy()], torch.device("cpu")), torch.tensor([len(whole) - 1]))
        return float(said)

    assert score("2") > score("9")
