"""Managers and scorers of verl's users (`verl_user_code`) run as they are, called as the trainer calls them."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.doors.parts import verl_user_code as user
from tests.doors.verl.test_frontdoor_reward_managers import view
from tests.failing import refused
from trivium.foundation.errors import ConfigError, RewardError, UnknownName
from trivium.frontdoors.verl import (
    BatchView,
    NaiveRewardManager,
    PrimeRewardManager,
    compute_reward,
    get_reward_manager_cls,
    load_reward_manager,
    register,
)
from trivium.frontdoors.verl.group_rewards import GroupRewards, as_manager
from trivium.text.tiny import tiny_tokenizer

FILE = str(Path(user.__file__))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


def rewarded(manager: Any, tokenizer: Any, data: BatchView) -> tuple[Any, dict[str, Any]]:
    """(one number per row, the extra information), from a thread, where the trainer's managers are called."""
    rewards = GroupRewards(as_manager(manager, tokenizer), tokenizer.pad_token_id)
    with ThreadPoolExecutor(1) as thread:
        tensor, extra = thread.submit(rewards.call_manager, data).result(120)
    return tensor.sum(-1).tolist(), {name: list(values) for name, values in extra.items()}


def rows(tokenizer: Any, *texts: str, **more: Any) -> BatchView:
    extra_info = {"extra_info": [{"index": row} for row in range(len(texts))]}
    return view(tokenizer, *texts, **{**extra_info, **more})


def config(manager: Any = None, scorer: str = "contains", layout: str = "2025", **kwargs: Any) -> dict[str, Any]:
    """A config that names a manager and a scorer, in the layout of a year."""
    function = {"path": FILE, "name": scorer}
    if layout == "2025":
        return {
            "reward_model": {"reward_manager": manager, "reward_kwargs": kwargs},
            "custom_reward_function": function,
        }
    named = {"source": "register", "name": manager} if isinstance(manager, str) else manager
    return {"reward": {"reward_manager": named, "reward_kwargs": kwargs, "custom_reward_function": function}}


def of_the_file(name: str) -> dict[str, Any]:
    return {"source": "importlib", "name": name, "module": {"path": FILE, "name": "custom_reward_manager"}}


@pytest.mark.parametrize(
    ("named", "wanted", "columns"),
    [
        (config(f"{FILE}:DenseRewardManager"), [1.0, 1.0, 1.0], {}),
        (config("by_item", bonus=2), [3.0, 2.0, 2.0], {"acc": [1.0, 0.0, 0.0], "prompt_length": [4, 4, 4]}),
        (config(of_the_file("PooledRewardManager"), layout="2026"), [1.0, 0.0, 0.0], {"acc": [1.0, 0.0, 0.0]}),
        (config(of_the_file("RelativeRewardManager")), [1.0, 1.0, 1.0], {"validating": [False] * 3}),
        (config(of_the_file("LimitedRewardManager")), [1.0, 0.0, 0.0], {"acc": [1.0, 0.0, 0.0]}),
        (config("naive", "with_alarm"), [1.0, 0.0, 0.0], {}),
        (config("by_item", "with_alarm"), [1.0, 0.0, 0.0], {"acc": [1.0, 0.0, 0.0]}),
        (config("batch", "batch_score", scale=3.0), [3.0, 0.0, 0.0], {"n": [1, 5, 1]}),
        (config("prime", "pair"), [1.0, 0.0, 0.0], {"reward_failed": [False, True, False]}),
        (config("prime", "with_alarm"), [1.0, 0.0, 0.0], {}),
        (config("single", "contains", "2026", bonus=0.5), [1.5, 0.5, 0.5], {"acc": [1.0, 0.0, 0.0]}),
        (config("single", "with_alarm", "2026"), [1.0, 0.0, 0.0], {"acc": [1.0, 0.0, 0.0]}),
        (config("single", "judged_later", "2026"), [1.0, 0.0, 0.0], {"judge": ["later"] * 3}),
        (config("bonus", "contains", "2026", bonus=0.5), [1.5, 0.5, 0.5], {"acc": [1.0, 0.0, 0.0]}),
        (config("bonus", "with_alarm", "2026", bonus=0.5), [1.5, 0.5, 0.5], {}),
        (config("bonus", "judged_later", "2026", bonus=0.5), [1.5, 0.5, 0.5], {"judge": ["later"] * 3}),
        (
            config("shorter", "contains", "2026", max_resp_len=5, overlong_buffer_cfg={"enable": True, "len": 2}),
            [1.0, -1.0, 0.0],
            {"acc": [1.0, 0.0, 0.0]},
        ),
        (config(of_the_file("TokenLevelRewardManager"), layout="2026"), [1.0, 0.0, 0.0], {}),
    ],
    ids=lambda value: "",
)
def test_a_manager_runs_unmodified(
    tokenizer: Any, named: dict[str, Any], wanted: list[float], columns: dict[str, Any]
) -> None:
    scores, extra = rewarded(load_reward_manager(named, tokenizer, 1), tokenizer, rows(tokenizer, "2", "raise", "x"))
    assert scores == pytest.approx(wanted)
    assert {name: extra.get(name) for name in columns} == columns


def test_a_scorer_of_format_and_accuracy(tokenizer: Any) -> None:
    named = config("naive", "format_and_accuracy")
    named["custom_reward_function"]["reward_kwargs"] = {"format_weight": 0.25}
    data = rows(tokenizer, "<think>1</think><answer>2</answer>", "<answer>2</answer>", "2", width=48)
    scores, extra = rewarded(load_reward_manager(named, tokenizer, 0), tokenizer, data)
    assert scores == [1.0, 0.75, 0.0]
    assert extra["format"] == [True, False, False]


def test_a_scorer_with_the_arguments_of_a_sandbox(tokenizer: Any) -> None:
    """Its semaphore is one of a multiprocessing.Manager, as verl's is."""
    with multiprocessing.Manager() as shared:
        named = config("naive", "sandboxed")
        named["custom_reward_function"]["reward_kwargs"] = {
            "sandbox_fusion_url": "http://sandbox.example/run_code",
            "concurrent_semaphore": shared.Semaphore(2),
            "memory_limit_mb": 512,
        }
        for manager in ("naive", "prime"):
            named["reward_model"]["reward_manager"] = manager
            loaded = load_reward_manager(named, tokenizer, 0)
            assert rewarded(loaded, tokenizer, rows(tokenizer, "a", "b"))[0] == [1.0, 1.0]
        assert user.default_compute_score("openai/gsm8k", "#### 2", "2", None, None, shared.Semaphore(1), 300) == 1.0
    with refused(ConfigError, "sandbox_fusion_url", "http://sandbox.example"):
        user.default_compute_score("taco", "x", "{}", None, "http://sandbox.example")


def test_what_a_class_of_managers_shares_serves_every_call(tokenizer: Any) -> None:
    manager: Any = load_reward_manager(config(of_the_file("RateLimitedRewardManager"), layout="2026"), tokenizer)
    for _ in range(2):  # a semaphore that belongs to the loop of the first call would fail the second
        assert rewarded(manager, tokenizer, rows(tokenizer, *"22222"))[0] == [1.0] * 5
    assert type(manager).most == 2
    assert compute_reward(rows(tokenizer, "2", ""), manager)[0].sum(-1).tolist() == [1.0, 0.0]

    class Duck:
        async def run_single(self, data: BatchView) -> Any:
            return {"reward_score": 1.0} if len(data) == 1 else None

    assert rewarded(Duck(), tokenizer, rows(tokenizer, "a", "b")) == ([1.0, 1.0], {})
    Duck.run_single = lambda self, data: _nothing()  # pyright: ignore[reportAttributeAccessIssue]
    with refused(RewardError, "sample 0", "Duck.run_single", "reward_score"):
        rewarded(Duck(), tokenizer, rows(tokenizer, "a"))


async def _nothing() -> None:
    return None


def test_scores_of_a_reward_model_are_passed_on(tokenizer: Any) -> None:
    for name in ("by_item", "single", "prime"):
        data = rows(tokenizer, "ab", "c", acc=[1, 0])
        data.batch["rm_scores"] = torch.ones(2, 24)
        data.meta_info["reward_extra_keys"] = ["acc"]
        manager = load_reward_manager(config(name, layout="2026"), tokenizer, 0)
        assert rewarded(manager, tokenizer, data) == ([24.0, 24.0], {"acc": [1, 0]})


def test_a_time_limit_of_each_sample(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    """`compute_score_timeout`: a sample that takes longer earns 0, and any other error ends the call."""

    async def slow(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
        if solution_str == "raise":
            raise KeyError("x")
        if solution_str == "slow":
            await user.asyncio.sleep(600)
        return 1.0

    manager = NaiveRewardManager(tokenizer, 0, slow, compute_score_timeout=2.5)
    scores, extra = rewarded(manager, tokenizer, rows(tokenizer, "a", "slow"))
    assert (scores, extra["reward_failed"]) == ([1.0, 0.0], [False, True])
    assert "no answer within 2.5 s" in caplog.text
    with refused(RewardError, "KeyError"):
        rewarded(manager, tokenizer, rows(tokenizer, "raise"))


# --------------------------------------------------------------------------- what a config says

SCORER = {"path": FILE, "name": "contains"}
OTHER = {"path": FILE, "name": "with_alarm"}
UNSET = {"path": None, "name": "compute_score"}
DEFAULT = {"source": "register", "name": "naive", "module": {"path": None, "name": "custom_reward_manager"}}


@pytest.mark.parametrize(
    ("named", "manager", "scorer"),
    [
        ({"reward_manager": DEFAULT, "custom_reward_function": UNSET}, "NaiveRewardManager", "default_compute_score"),
        (
            {"reward_model": {"reward_manager": "dapo"}, "reward_manager": DEFAULT, "custom_reward_function": SCORER},
            "DAPORewardManager",
            "contains",
        ),
        (
            {"reward_model": {"reward_manager": "naive"}, "reward_manager": {**DEFAULT, "name": "prime"}},
            "PrimeRewardManager",
            "default_compute_score",
        ),
        (
            {"reward": {"reward_manager": {**DEFAULT, "name": "batch"}, "custom_reward_function": SCORER}},
            "BatchRewardManager",
            "contains",
        ),
        (
            {"custom_reward_function": SCORER, "reward": {"custom_reward_function": UNSET, "reward_manager": DEFAULT}},
            "NaiveRewardManager",
            "contains",
        ),
        (
            {
                "reward_model": {
                    "reward_manager": "naive",
                    "reward_loop_source": "importlib",
                    "reward_loop_module_path": FILE,
                    "reward_loop_class_name": "ByItemRewardManager",
                }
            },
            "ByItemRewardManager",
            "default_compute_score",
        ),
        (
            {
                "reward_manager": {
                    "source": "importlib",
                    "name": "SingleRewardManager",
                    "module": {"path": "pkg://tests.doors.parts.verl_user_code"},
                }
            },
            "SingleRewardManager",
            "default_compute_score",
        ),
    ],
)
def test_a_default_beside_a_choice_is_none(tokenizer: Any, named: Any, manager: str, scorer: str) -> None:
    loaded: Any = load_reward_manager(named, tokenizer, 0)
    assert type(loaded).__name__ == manager
    assert loaded.compute_score.__name__ == scorer


@pytest.mark.parametrize(
    ("named", "name"),
    [
        ({"reward_model": {"reward_manager": "dapo"}, "reward_manager": {"name": "prime"}}, "dapo"),
        ({"reward_manager": {"name": "dapo"}, "reward": {"reward_manager": {"name": "batch"}}}, "batch"),
        ({"custom_reward_function": SCORER, "reward": {"custom_reward_function": OTHER}}, "with_alarm"),
        ({"reward_manager": {**DEFAULT, "module": {"path": FILE}}}, "reward_manager.module.path"),
        ({"reward_manager": {"source": "importlib", "name": "X"}}, "reward_manager.module.path"),
        ({"reward_manager": {"source": "git", "name": "X"}}, "reward_manager.source"),
    ],
)
def test_contradictions_are_refused(tokenizer: Any, named: Any, name: str) -> None:
    with refused(ConfigError, name):
        load_reward_manager(named, tokenizer, 0)


def test_registered_names(tokenizer: Any) -> None:
    assert get_reward_manager_cls("by_item").__name__ == "ByItemRewardManager"
    assert get_reward_manager_cls("prime") is PrimeRewardManager
    with refused(UnknownName, "naive"):
        get_reward_manager_cls("niave")
    with refused(ConfigError, "'by_item'"):
        register("by_item")(NaiveRewardManager)
    assert register("by_item")(user.ByItemRewardManager) is user.ByItemRewardManager
