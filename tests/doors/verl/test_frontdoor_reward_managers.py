"""Reward managers: positions of rewards, extra information, and samples that cannot be scored."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.failing import refused
from trivium.foundation.concurrency import left_behind
from trivium.foundation.errors import ConfigError, DataError, RewardError, TriviumError, UnknownName
from trivium.foundation.registry import resolve
from trivium.frontdoors import verl
from trivium.frontdoors.verl import (
    BatchRewardManager,
    BatchView,
    DAPORewardManager,
    NaiveRewardManager,
    compute_reward,
    default_compute_score,
    load_reward_manager,
)
from trivium.text.tiny import tiny_tokenizer

CALLS: list[Any] = []
HELD = threading.Event()
"""Ends scorers that hang, at the end of a test."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The tiny tokenizer: a token per character, and an end token."""
    return tiny_tokenizer()


@pytest.fixture(autouse=True)
def nothing_hangs_on() -> Iterator[None]:
    CALLS.clear()
    HELD.clear()
    before = left_behind()
    yield
    HELD.set()
    end = time.monotonic() + 60
    while left_behind() > before:
        assert time.monotonic() < end
        time.sleep(0.01)


def view(tokenizer: Any, *texts: str, sources: list[str] | None = None, width: int = 24, **columns: Any) -> BatchView:
    """Padded responses to `1+1?` with end tokens."""
    prompt = tokenizer.encode("1+1?", add_special_tokens=False)
    rows = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    responses = torch.full((len(rows), width), tokenizer.pad_token_id)
    attention = torch.zeros(len(rows), width + 6, dtype=torch.long)
    attention[:, 6 - len(prompt) : 6] = 1
    for row, tokens in enumerate(rows):
        responses[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
        attention[row, 6 : 6 + len(tokens)] = 1
    prompts = torch.full((len(rows), 6), tokenizer.pad_token_id)
    prompts[:, 6 - len(prompt) :] = torch.tensor(prompt)
    standard = {
        "data_source": sources or ["openai/gsm8k"] * len(rows),
        "reward_model": [{"style": "rule", "ground_truth": "2"}] * len(rows),
        "uid": [f"train/{row}/0" for row in range(len(rows))],
    }
    return BatchView.from_dict(
        {"prompts": prompts, "responses": responses, "attention_mask": attention}, {**standard, **columns}
    )


def told(manager: Any, data: BatchView) -> tuple[torch.Tensor, dict[str, Any]]:
    found = manager(data, return_dict=True)
    assert found.keys() == {"reward_tensor", "reward_extra_info"}
    return found["reward_tensor"], found["reward_extra_info"]


# --------------------------------------------------------------------------- scorers, of a module


def length(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    CALLS.append((data_source, solution_str, ground_truth, extra_info, threading.current_thread()))
    return float(len(solution_str))


def moody(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> Any:
    """Behaves as the solution's text names."""
    CALLS.append(solution_str)
    if solution_str == "raise":
        raise KeyError("missing")
    if solution_str == "exit":
        raise SystemExit(0)
    if solution_str == "hang":
        HELD.wait(600)
    scores = {
        "nan": math.nan,
        "inf": -math.inf,
        "none": None,
        "text": "1",
        "list": [1.0],
        "dict": {"acc": 1.0},
        "huge": 10**400,
        "bool": True,
        "numpy": np.float32(0.5),
        "torch": torch.tensor(0.25),
        "bad": {"score": math.nan, "acc": 1},
    }
    return scores.get(solution_str, 1.0)


# --------------------------------------------------------------------------- naive


def test_a_reward_is_on_the_last_token_of_its_response(tokenizer: Any) -> None:
    end = tokenizer.eos_token
    data = view(tokenizer, "abc" + end, "a", "no #### 2", extra_info=[{"index": 1}, None, {}], __num_turns__=[2, 4, 2])
    rewards, extra = told(NaiveRewardManager(tokenizer, 0, length), data)
    assert rewards.dtype == torch.float32
    assert rewards.shape == (3, 24)
    assert rewards.nonzero().tolist() == [[0, 3], [1, 0], [2, 8]]  # the end is a token of the response
    assert rewards.sum(-1).tolist() == [3.0, 1.0, 9.0]  # and no letter of its text
    assert extra == {}
    assert CALLS[0][:3] == ("openai/gsm8k", "abc", "2")
    assert CALLS[0][3] == {"index": 1, "num_turns": 2, "rollout_reward_scores": {}}
    assert CALLS[1][3]["num_turns"] == 4
    assert data.non_tensor_batch["extra_info"][0] == {"index": 1}  # the row's own is left as it was
    assert torch.equal(NaiveRewardManager(tokenizer, 0, length)(data), rewards)


def test_the_default_scorer(tokenizer: Any) -> None:
    data = view(tokenizer, "#### 2", "#### 3", "Answer: 2", sources=["openai/gsm8k", "openai/gsm8k", "math_dapo"])
    rewards, extra = told(NaiveRewardManager(tokenizer, 0), data)
    assert rewards.sum(-1).tolist() == [1.0, 0.0, 1.0]
    assert extra == {"score": [None, None, 1.0], "acc": [None, None, True], "pred": [None, None, "2"]}
    with refused(RewardError, "'nowhere'"):
        NaiveRewardManager(tokenizer, 0)(view(tokenizer, "2", sources=["nowhere"]))


def test_another_column_says_where_tasks_come_from(tokenizer: Any) -> None:
    data = view(tokenizer, "#### 2", sources=["unknown"], origin=["openai/gsm8k"])
    assert told(NaiveRewardManager(tokenizer, 0, reward_fn_key="origin"), data)[0].sum() == 1.0
    with refused(DataError, "sample 0", "'elsewhere'"):
        NaiveRewardManager(tokenizer, 0, reward_fn_key="elsewhere")(data)
    lacking = view(tokenizer, "#### 2", reward_model=[{"style": "model"}])
    with refused(DataError, "ground_truth"):
        NaiveRewardManager(tokenizer, 0)(lacking)


def test_scores_that_are_there_already_are_passed_on(tokenizer: Any) -> None:
    data = view(tokenizer, "a", "b", acc=[1, 0])
    data.batch["rm_scores"] = torch.ones(2, 24)
    data.meta_info["reward_extra_keys"] = ["acc"]
    rewards, extra = told(NaiveRewardManager(tokenizer, 0, moody), data)
    assert rewards is data.batch["rm_scores"]
    assert [*extra["acc"]] == [1, 0]
    assert CALLS == []


def test_an_empty_response_has_no_token_to_reward(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    data = view(tokenizer, "", "ab")
    rewards, _ = told(NaiveRewardManager(tokenizer, 0, lambda **sample: -1.0), data)
    assert rewards.nonzero().tolist() == [[1, 1]]
    assert "sample 0 of train/0/0" in caplog.text
    assert "empty response" in caplog.text
    assert told(NaiveRewardManager(tokenizer, 0, length), view(tokenizer))[0].shape == (0, 24)


def test_some_samples_of_each_source_are_logged_and_printed(
    tokenizer: Any, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "trivium")
    texts = ["#### 2", "#### 3", "#### 4", "Answer: 2"]
    data = view(tokenizer, *texts, sources=["openai/gsm8k"] * 3 + ["math_dapo"])
    NaiveRewardManager(tokenizer, 2)(data)
    assert [text in caplog.text for text in ("#### 2", "#### 3", "#### 4", "Answer: 2")] == [True, True, False, True]
    assert "[prompt] 1+1?" in caplog.text
    assert "'pred': '2'" in caplog.text
    printed = capfd.readouterr().out
    assert [text in printed for text in ("#### 2", "#### 3", "#### 4", "Answer: 2")] == [True, True, False, True]


@pytest.mark.parametrize(("text", "wanted"), [("bool", 1.0), ("numpy", 0.5), ("torch", 0.25)])
def test_what_counts_as_a_number(tokenizer: Any, text: str, wanted: float) -> None:
    assert told(NaiveRewardManager(tokenizer, 0, moody), view(tokenizer, text))[0].sum() == wanted


BAD = {
    "raise": "KeyError: 'missing'",
    "exit": "SystemExit(0)",
    "nan": "nan",
    "inf": "-inf",
    "none": "NoneType",
    "text": "str",
    "list": "list",
    "dict": "dict",
    "huge": "too large",
    "bad": "nan",
}


@pytest.mark.parametrize("text", BAD)
def test_a_sample_without_a_score_is_reported_once_by_name(tokenizer: Any, text: str) -> None:
    manager = NaiveRewardManager(tokenizer, 0, moody)
    with refused(RewardError, "sample 1", "train/1/0", "'openai/gsm8k'", "'2'", BAD[text], "on_error") as caught:
        compute_reward(view(tokenizer, "fine", text, "after"), manager)
    assert ["fine", text] == CALLS  # once, and nothing after it
    if text == "raise":
        assert isinstance(caught.value.__cause__, KeyError)


def test_failures_may_be_a_reward_and_are_counted(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    manager = NaiveRewardManager(tokenizer, 0, moody, on_error=-2.0, deadline_s=3.0)
    rewards, extra = told(manager, view(tokenizer, "fine", "raise", "nan", "hang", "fine"))
    assert rewards.sum(-1).tolist() == [1.0, -2.0, -2.0, -2.0, 1.0]
    assert extra["reward_failed"] == [False, True, True, True, False]
    assert "sample 3 of train/3/0" in extra["reward_error"][3]
    assert "no answer within 3 s" in extra["reward_error"][3]
    assert extra["reward_error"][0] == ""
    assert "3 of 5 samples could not be scored" in caplog.text
    assert CALLS == ["fine", "raise", "nan", "hang", "fine"]


@pytest.mark.parametrize("policy", [{"on_error": "ignore"}, {"on_error": math.nan}, {"deadline_s": 0}])
def test_policies_that_there_are_not(tokenizer: Any, policy: dict[str, Any]) -> None:
    with refused(ConfigError, next(iter(policy))):
        NaiveRewardManager(tokenizer, 0, moody, **policy)


# --------------------------------------------------------------------------- deadlines, threads and processes


def test_a_scorer_that_hangs_is_given_up_at_its_deadline(tokenizer: Any) -> None:
    began = time.monotonic()
    with refused(RewardError, "sample 1", "train/1/0", "2.5 s"):
        NaiveRewardManager(tokenizer, 0, moody, deadline_s=2.5)(view(tokenizer, "fine", "hang"))
    assert time.monotonic() - began < 60


ELSEWHERE = """
import os, time

def moody(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    if solution_str == "raise":
        raise KeyError("missing")
    if solution_str == "hang":
        time.sleep(600)
    if solution_str == "start":
        os.system("sleep 90")
    if solution_str == "hold":
        return 7 ** (7 ** 12) > 0
    if solution_str == "leave":
        os._exit(7)
    return os.getpid() if solution_str == "pid" else sum(extra_info["array"]) + extra_info["number"] + bonus
"""


@pytest.fixture
def elsewhere(tmp_path: Path) -> Any:
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    return resolve("rewards", f"{tmp_path}/elsewhere.py:moody")


def test_a_process_is_killed_even_where_it_holds_the_interpreter(tokenizer: Any, elsewhere: Any) -> None:
    manager = NaiveRewardManager(tokenizer, 0, elsewhere, deadline_s=4.0, workers=2, on_error=0.0)
    data = view(tokenizer, "pid", "hold", "hang", "raise", "leave", "pid")
    rewards, extra = told(manager, data)
    errors = extra["reward_error"]
    assert ["no answer within 4 s" in error for error in errors] == [False, True, True, False, False, False]
    assert "KeyError: 'missing'" in errors[3]
    assert "ended with code 7" in errors[4]
    pids = {int(rewards[row].sum()) for row in (0, 5)}
    assert 0 not in pids
    assert os.getpid() not in pids


def test_a_process_that_a_killed_one_has_started_delays_no_call(tokenizer: Any, elsewhere: Any) -> None:
    manager = NaiveRewardManager(tokenizer, 0, elsewhere, deadline_s=1.0, workers=1, on_error=0.0)
    began = time.monotonic()
    _, extra = told(manager, view(tokenizer, "start"))
    assert "no answer within 1 s" in extra["reward_error"][0]
    assert time.monotonic() - began < 80


def test_a_function_with_options_in_processes(tokenizer: Any, elsewhere: Any) -> None:
    manager = NaiveRewardManager(tokenizer, 0, functools.partial(elsewhere, bonus=0.5), workers=1)
    data = view(tokenizer, "x", extra_info=[{"array": np.arange(3), "number": np.int64(4)}])
    assert told(manager, data)[0].sum() == 7.5


@pytest.mark.parametrize("function", [lambda **sample: 1.0, functools.partial(moody, "x"), threading.Lock().acquire])
def test_only_what_can_be_imported_runs_in_processes(tokenizer: Any, function: Any) -> None:
    with pytest.raises((ConfigError, UnknownName)):
        NaiveRewardManager(tokenizer, 0, function, workers=1)


def test_scorers_that_wait_do_so_side_by_side(tokenizer: Any) -> None:
    inside = set[str]()
    most = 0

    async def waits(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
        nonlocal most
        inside.add(solution_str)
        most = max(most, len(inside))
        await asyncio.sleep(0.05 if solution_str != "f" else 600)
        inside.discard(solution_str)
        return float(ord(solution_str))

    manager = NaiveRewardManager(tokenizer, 0, waits, deadline_s=60)
    assert told(manager, view(tokenizer, *"abcde"))[0].sum(-1).tolist() == [97.0, 98.0, 99.0, 100.0, 101.0]
    assert most == 5
    with refused(RewardError, "sample 0"):
        NaiveRewardManager(tokenizer, 0, waits, deadline_s=0.2)(view(tokenizer, "f"))


async def test_a_manager_may_be_called_inside_a_loop(tokenizer: Any) -> None:
    assert told(NaiveRewardManager(tokenizer, 0, length), view(tokenizer, "ab"))[0].sum() == 2.0


# --------------------------------------------------------------------------- dapo

BUFFER = {"enable": True, "len": 4, "penalty_factor": 1.0, "log": True}


@pytest.mark.parametrize("config", [BUFFER, SimpleNamespace(**BUFFER)])
def test_overlong_responses_lose_reward(tokenizer: Any, config: Any) -> None:
    manager = DAPORewardManager(tokenizer, 0, length, max_resp_len=20, overlong_buffer_cfg=config)
    texts = ["a" * count for count in (16, 17, 20, 24)]
    rewards, extra = told(manager, view(tokenizer, *texts))
    assert rewards.sum(-1).tolist() == [16.0, 16.75, 19.0, 23.0]  # beyond the limit no more than at it
    assert extra["overlong_reward"] == [0.0, -0.25, -1.0, -1.0]
    assert extra["overlong"] == [False, True, True, True]
    assert extra["acc"] == [16.0, 17.0, 20.0, 24.0]


@pytest.mark.parametrize("config", [None, {"enable": False, "len": 4, "penalty_factor": 1.0}])
def test_without_a_buffer_nothing_is_taken_off(tokenizer: Any, config: Any) -> None:
    rewards, extra = told(
        DAPORewardManager(tokenizer, 0, overlong_buffer_cfg=config),
        view(tokenizer, "Answer: 2", "Answer: 3", sources=["math_dapo"] * 2),
    )
    assert rewards.sum(-1).tolist() == [1.0, -1.0]
    assert extra == {"score": [1.0, -1.0], "acc": [True, False], "pred": ["2", "3"]}


@pytest.mark.parametrize(
    ("longest", "config"),
    [
        (None, BUFFER),
        (3, BUFFER),
        (20, {**BUFFER, "len": 0}),
        (20, {"enable": True}),
        (20, {**BUFFER, "penalty_factor": -1}),
    ],
)
def test_buffers_that_cannot_be(tokenizer: Any, longest: int | None, config: Any) -> None:
    with refused(ConfigError, "overlong_buffer_cfg.len", "max_resp_len", "penalty_factor"):
        DAPORewardManager(tokenizer, 0, max_resp_len=longest, overlong_buffer_cfg=config)


def test_an_end_that_is_left_in_the_text_is_no_part_of_the_answer(tokenizer: Any) -> None:
    end = tokenizer.eos_token
    tokenizer_that_shows = SimpleNamespace(
        eos_token=end, decode=lambda ids, skip_special_tokens: tokenizer.decode(ids, skip_special_tokens=False)
    )
    assert told(DAPORewardManager(tokenizer_that_shows, 0, length), view(tokenizer, "ab" + end))[0].sum() == 2.0


def test_a_stand_in_for_a_score_is_not_shaped(tokenizer: Any) -> None:
    manager = DAPORewardManager(
        tokenizer, 0, moody, max_resp_len=5, overlong_buffer_cfg={**BUFFER, "len": 5}, on_error=-3.0
    )
    rewards, extra = told(manager, view(tokenizer, "raise", "fine"))
    assert rewards.sum(-1).tolist() == [-3.0, pytest.approx(0.2)]
    assert extra["acc"] == [None, 1.0]
    assert extra["reward_failed"] == [True, False]


# --------------------------------------------------------------------------- batch


def batch(data_sources: Any, solution_strs: list[str], ground_truths: Any, extra_infos: Any, base: int = 0) -> Any:
    CALLS.append(len(solution_strs))
    if "raise" in solution_strs:
        raise OSError("no judge")
    if "short" in solution_strs:
        return [1.0]
    return [{"score": base + len(s), "s": s} if len(s) > 1 else math.inf for s in solution_strs]


def test_a_batch_is_one_call(tokenizer: Any) -> None:
    manager = BatchRewardManager(tokenizer, 0, batch, base=10)
    data = view(tokenizer, "ab", "abc")
    rewards, extra = told(manager, data)
    assert rewards.sum(-1).tolist() == data.batch["acc"].tolist() == [12.0, 13.0]
    assert extra == {"score": [12, 13], "s": ["ab", "abc"]}
    assert CALLS == [2]


@pytest.mark.parametrize(
    ("texts", "names"),
    [
        (("ab", "raise"), ("2 samples", "sample 0", "OSError: no judge")),
        (("ab", "short"), ("1 results", "2 samples")),
        (("ab", "a"), ("sample 1", "inf")),
    ],
)
def test_a_batch_that_fails(tokenizer: Any, texts: tuple[str, ...], names: tuple[str, ...]) -> None:
    with refused(RewardError, *names):
        BatchRewardManager(tokenizer, 0, batch)(view(tokenizer, *texts))
    assert CALLS == [2]
    rewards, extra = told(BatchRewardManager(tokenizer, 0, batch, on_error=-1.0), view(tokenizer, *texts))
    assert rewards[1].sum() == -1.0
    assert extra["reward_failed"][1]


# --------------------------------------------------------------------------- compute_reward


def test_a_manager_that_raises_is_called_once(tokenizer: Any) -> None:
    def manager(data: Any, return_dict: bool = False) -> Any:
        CALLS.append(return_dict)
        raise ValueError("broken")

    with refused(RewardError, "2 samples", "manager", "ValueError: broken") as caught:
        compute_reward(view(tokenizer, "a", "b"), manager)
    assert CALLS == [True]
    assert isinstance(caught.value.__cause__, ValueError)


def test_managers_of_other_kinds(tokenizer: Any) -> None:
    data = view(tokenizer, "a", "b")
    ones = torch.ones(2, 24)
    assert compute_reward(data, lambda data: ones) == (ones, {})
    assert compute_reward(data, lambda data, return_dict: {"reward_tensor": ones}) == (ones, {})
    assert compute_reward(data, lambda data, **extra: {"reward_tensor": ones, "reward_extra_info": extra}) == (
        ones,
        {"return_dict": True},
    )
    with refused(RewardError, "(B, R)", "list"):
        compute_reward(data, lambda data: [1.0, 1.0])


# --------------------------------------------------------------------------- from a config

USER = """
import torch
from trivium.frontdoors.verl import AbstractRewardManager

def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    return {"score": len(solution_str) + bonus, "mine": True}

def other(data_source, solution_str, ground_truth, extra_info=None):
    return 7.0

class Manager(AbstractRewardManager):
    def __init__(self, tokenizer, num_examine, compute_score, reward_fn_key="data_source", **kwargs):
        self.arguments = (num_examine, compute_score, reward_fn_key, kwargs)

    def __call__(self, data, return_dict=False):
        return torch.zeros(len(data), 1)
"""


@pytest.fixture
def user_file(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(USER)
    return str(tmp_path / "mine.py")


def attributes(config: Any) -> Any:
    """The same config as an object with attributes."""
    return SimpleNamespace(**{k: attributes(v) if isinstance(v, dict) else v for k, v in config.items()})


def test_managers_by_name(tokenizer: Any) -> None:
    for config in ({}, {"reward_model": {}}, {"reward_model": {"reward_manager": "naive"}}):
        manager = load_reward_manager(config, tokenizer, 3)
        assert type(manager) is NaiveRewardManager
        assert (manager.num_examine, manager.compute_score) == (3, default_compute_score)
    dapo = {
        "reward_model": {"reward_manager": "dapo", "reward_kwargs": {"max_resp_len": 20, "overlong_buffer_cfg": BUFFER}}
    }
    manager = load_reward_manager(dapo, tokenizer, 0, max_resp_len=22)
    assert (type(manager), manager.max_resp_len) == (DAPORewardManager, 22)  # the caller's word counts
    assert told(manager, view(tokenizer, "a" * 19, sources=["math_dapo"]))[1]["overlong_reward"] == [-0.25]
    assert type(load_reward_manager({"reward_manager": {"source": "register", "name": "batch"}}, tokenizer, 0)) is (
        BatchRewardManager
    )
    keyed = load_reward_manager({"data": {"reward_fn_key": "origin"}}, tokenizer, 0)
    assert keyed.reward_fn_key == "origin"


def test_a_scorer_and_a_manager_of_the_users_own(tokenizer: Any, user_file: str) -> None:
    config: dict[str, Any] = {"custom_reward_function": {"path": user_file, "reward_kwargs": {"bonus": 0.5}}}
    for shaped in (config, attributes(config)):
        manager = load_reward_manager(shaped, tokenizer, 0)
        rewards, extra = told(manager, view(tokenizer, "abc"))
        assert (rewards.sum(), extra["mine"]) == (3.5, [True])
    config["custom_reward_function"] = {"path": user_file, "name": "other"}
    elsewhere = load_reward_manager(config, tokenizer, 0, workers=1)
    assert told(elsewhere, view(tokenizer, "abc"))[0].sum() == 7.0
    for named in (
        {"reward_model": {"reward_manager": f"{user_file}:Manager"}},
        {"reward_manager": {"source": "importlib", "name": "Manager", "module": {"path": user_file}}},
    ):
        manager = load_reward_manager({**config, **named}, tokenizer, 2, option=1)
        assert manager.arguments[0] == 2
        assert manager.arguments[1](None, "", "") == 7.0
        assert manager.arguments[3] == {"option": 1}


@pytest.mark.parametrize(
    ("config", "kind", "name"),
    [
        ({"reward_model": {"reward_manager": "niave"}}, UnknownName, "'naive'"),
        ({"reward_model": {"reward_kwargs": {"max_len": 3}}}, ConfigError, "'max_len'"),
        ({"custom_reward_function": {"path": "nowhere.py"}}, ConfigError, "nowhere.py"),
    ],
)
def test_configs_that_cannot_be(tokenizer: Any, config: Any, kind: type[ConfigError], name: str) -> None:
    with refused(kind, name):
        load_reward_manager(config, tokenizer, 0)


def test_a_memory_limit_for_programs(tokenizer: Any) -> None:
    config = {"reward_model": {"sandbox_fusion": {"url": None, "memory_limit_mb": 300}}}
    found = load_reward_manager(config, tokenizer, 0).compute_score
    assert found.keywords == {"memory_limit_mb": 300}
    assert found("openai/gsm8k", "#### 2", "2", None) == 1.0


def test_torch_comes_only_with_what_needs_it() -> None:
    code = "import sys, trivium.rewards, trivium.rewards.by_source as b; assert 'torch' not in sys.modules; "
    code += "assert b.default_compute_score('openai/gsm8k', '#### 2', '2') == 1; assert 'torch' not in sys.modules; "
    code += "from trivium.frontdoors import verl; assert 'torch' not in sys.modules; "
    code += "verl.NaiveRewardManager; assert 'torch' not in sys.modules; "
    code += "verl.AbstractSampler; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert issubclass(RewardError, TriviumError)
    with pytest.raises(AttributeError, match="NoSuchManager"):
        verl.NoSuchManager  # noqa: B018
