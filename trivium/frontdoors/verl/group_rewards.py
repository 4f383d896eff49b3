"""Rewards as in verl: a reward manager scores all rollouts of a step in one call."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from pydantic import PrivateAttr

from trivium.buffers.strategies import DefaultStrategy
from trivium.foundation.concurrency import Threads, run_here
from trivium.foundation.errors import ConfigError, DataError
from trivium.frontdoors.keywords import accepted
from trivium.frontdoors.verl.objects.batches.batch_view import BatchView, living, on_last_tokens, scored_rows
from trivium.frontdoors.verl.objects.batches.protocol import DataProto
from trivium.frontdoors.verl.objects.datasets.orders import Orders
from trivium.frontdoors.verl.reward_managers import NaiveRewardManager
from trivium.frontdoors.verl.rewards.reward_loading import RewardManager, as_rewards, compute_reward
from trivium.frontdoors.verl.rewards.scorer import RewardSample
from trivium.models.late import torch
from trivium.policy import MAX_METRIC, finite_number
from trivium.processes.user_calls import UserCall
from trivium.protocols import Buffer
from trivium.types import Batch, Capabilities, Group, Sample, Trajectory, experiences_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_KIND = "trivium.frontdoors.verl.group_rewards:RewardedOnTake"
Extras = Mapping[str, Any]
"""The extra information that a reward manager returned for one trajectory."""


@dataclass(frozen=True)
class Hooks:
    """Callbacks of a trainer around the rewards of a step."""

    compute: Callable[[BatchView], object] | None = None
    """Computes rewards instead of the manager. It may call the manager (`GroupRewards.call_manager`)."""
    balance: Callable[[BatchView], None] | None = None
    """Receives the rollouts of a step before rewards are computed, and may reorder them."""


@dataclass(frozen=True)
class GroupRewards:
    """Computes the rewards of groups with one call of a reward manager."""

    manager: RewardManager
    """Called with a BatchView and `return_dict=True`."""
    pad_token_id: int
    model: Callable[[Batch], list[float]] | None = None
    """Computes the reward model's scores, which the manager receives as `rm_scores`; None without a reward model."""
    hooks: Hooks = field(default_factory=Hooks)

    def call_manager(self, view: BatchView) -> tuple[torch.Tensor, Mapping[str, Any]]:
        """Returns the manager's rewards (B, R) and extra information."""
        outcome: Any = run_here(self._call(data=view))
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    @cached_property
    def _call(self) -> UserCall:
        function = functools.partial(compute_reward, reward_fn=self.manager)
        return UserCall(function, Threads(1, "a reward manager"), label="the reward manager")

    def balanced(self, groups: Sequence[Group], **meta: object) -> list[Group]:
        """Returns the groups in the order of their rows after the hook. Groups without a row come last.

        Raises DataError if the hook dropped a group.
        """
        view = BatchView.of(groups, self.pad_token_id, meta_info=meta)
        if self.hooks.balance is None or not len(view):
            return list(groups)
        before = set(view.non_tensor_batch["uid"])
        self.hooks.balance(view)
        order = {uid: place for place, uid in enumerate(dict.fromkeys(view.non_tensor_batch["uid"]))}
        if set(order) != before:
            raise DataError(
                f"the rows of {len(before)} prompts from _balance_batch",
                f"rows of {len(order)}",
                "only reorder the rows: a step trains on all of them",
            )
        return sorted(groups, key=lambda group: order.get(group.group_id, len(order)))

    def __call__(self, groups: Sequence[Group], **meta: object) -> tuple[list[Group], list[Extras]]:
        """Returns (groups with rewards, extra information of each living member in order). `meta` becomes `meta_info`.

        Raises the errors of `compute_reward`, and DataError unless the manager returns one finite reward per member.
        """
        # The greedy rollout of ReMax is a further row of the call: its reward is the baseline of the others.
        scored = [replace(group, trajectories=group.rollouts, greedy=None) for group in groups]
        view = BatchView.of(scored, self.pad_token_id, meta_info=meta)
        if not len(view):
            return list(groups), []
        if self.model is not None:
            self._add_model_scores(view, scored)
        if self.hooks.compute is None:
            rewards, extra = self.call_manager(view)
        else:
            rewards, extra = as_rewards(self.hooks.compute(view), "_compute_reward")
        rows = scored_rows(rewards, view, extra)
        members = [member for _, member in living(scored)]
        by_member = {id(m): _rewarded(m, row.score, row.extra) for m, row in zip(members, rows, strict=True)}
        judged = [
            replace(
                group,
                trajectories=tuple(by_member.get(id(member), member) for member in group.trajectories),
                greedy=by_member.get(id(group.greedy), group.greedy),
            )
            for group in groups
        ]
        greedy = {id(group.greedy) for group in groups}
        return judged, [row.extra for m, row in zip(members, rows, strict=True) if id(m) not in greedy]

    def _add_model_scores(self, view: BatchView, groups: Sequence[Group]) -> None:
        """Adds `rm_scores`: the score of each trajectory's last sequence, on its last response token if it has one."""
        assert self.model is not None
        sequences = [(experiences_of(group, member) or [None])[-1] for group, member in living(groups)]
        experiences = tuple(sequence for sequence in sequences if sequence is not None)
        scores = iter(self.model(Batch(experiences)) if experiences else ())
        view.batch["rm_scores"] = on_last_tokens(
            view, [0.0 if sequence is None else next(scores) for sequence in sequences]
        )


def _rewarded(member: Trajectory, score: float, extra: Extras) -> Trajectory:
    """Returns the member with its reward. Numbers in the extra information are logged under `workflow/`."""
    numbers = {
        name: number for name, value in extra.items() if name != "score" and (number := number_of(value)) is not None
    }
    return replace(member, rewards={**member.rewards, "reward": score}, metrics={**member.metrics, **numbers})


def number_of(value: object) -> float | None:
    """Returns a value of the extra information if it is a finite number that can be logged, else None."""
    try:
        return finite_number(value, MAX_METRIC)
    except ValueError:
        return None


class RewardedOnTake(DefaultStrategy):
    """Computes the rewards of the groups that a step takes from the buffer, all together."""

    capabilities = Capabilities(judges=True)

    class Config(DefaultStrategy.Config):
        """How a saved run records that the `reward_fn` of a script gave the rewards."""

        kind: str = _KIND
        _rewards: GroupRewards | None = PrivateAttr(default=None)
        _orders: Orders | None = PrivateAttr(default=None)

        @classmethod
        def by(cls, rewards: GroupRewards, orders: Orders | None = None) -> RewardedOnTake.Config:
            """Returns the config section for these rewards, over rows in these orders."""
            config = cls(kind=_KIND)  # set explicitly: a dump with `exclude_unset` keeps it
            config._rewards, config._orders = rewards, orders
            return config

    def __init__(self, config: Config, *, buffer: Buffer, **beside: object) -> None:
        super().__init__(config, buffer=buffer, **beside)
        if config._rewards is None:
            raise ConfigError(
                "the reward_fn of a run of RayPPOTrainer",
                "only the script that built the run has it",
                "build the RayPPOTrainer again and call fit()",
            )
        self._rewards, self._orders = config._rewards, config._orders

    async def sample(self, count: int, version: int) -> Sample:
        sample = await super().sample(count, version)
        meta = {"global_steps": version + 1, "validate": False}
        # In threads: hooks and managers are the user's, and may block.
        groups = await asyncio.to_thread(self._rewards.balanced, sample.groups, **meta)
        groups, _ = await asyncio.to_thread(self._rewards, groups, **meta)
        return replace(sample, groups=tuple(groups))

    def state(self) -> dict[str, Any]:
        """Returns the strategy's state, with the state of a learning sampler."""
        learned = {} if self._orders is None else self._orders.state()
        return super().state() | ({"sampler": learned} if learned else {})

    async def restore(self, state: Mapping[str, Any]) -> None:
        await super().restore(state)
        if self._orders is not None:
            self._orders.restore(state.get("sampler", {}))


# --------------------------------------------------------------------------- managers


def as_manager(reward_fn: object, tokenizer: PreTrainedTokenizerBase) -> RewardManager:
    """Returns a reward manager for a manager, `compute_score(data_source, solution_str, ground_truth, extra_info)`, or
    `f(prompt, completion, **columns)`."""
    if hasattr(reward_fn, "run_single"):
        return cast(RewardManager, reward_fn)
    if not callable(reward_fn):
        raise ConfigError(
            "a reward_fn",
            f"a {type(reward_fn).__name__}",
            "pass a reward manager, or a function of a completion",
        )
    names = set(inspect.signature(reward_fn).parameters)
    if "solution_str" in names:
        return NaiveRewardManager(tokenizer, num_examine=0, compute_score=reward_fn)
    return PlainReward(reward_fn, tokenizer) if {"prompt", "completion"} <= names else reward_fn


@dataclass(frozen=True)
class _PlainSample(RewardSample):
    """One row as arguments of `f(prompt, completion, **columns)`."""

    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def name(self) -> str:
        return f"sample {self.row} (data source {self.data_source!r})"

    @property
    def arguments(self) -> dict[str, Any]:
        return {**self.columns, "prompt": self.prompt, "completion": self.response}


def _as_float(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that it returns a float, also for text and arrays of one number."""
    if inspect.iscoroutinefunction(function):
        return function
    return lambda **arguments: float(function(**arguments))


class PlainReward(NaiveRewardManager):
    """A reward manager over `f(prompt, completion, **columns) -> float`. Columns are passed by parameter name."""

    _scores_empty = True

    def __init__(self, function: Callable[..., Any], tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer, 0, _as_float(function))
        self._function = function

    def _extract_reward_from_rm_scores(self, data: DataProto, return_dict: bool = False) -> None:
        """The function alone gives the rewards."""

    def _sample(
        self, row: int, columns: Mapping[str, Any], prompt: torch.Tensor, response: torch.Tensor
    ) -> RewardSample:
        texts = [message["content"] for message in columns["raw_prompt"] if message["role"] == "user"]
        decoded = str(self.tokenizer.decode(response, skip_special_tokens=True))
        arguments = accepted(self._function, columns)
        source, last = str(columns["data_source"]), texts[-1] if texts else ""
        return _PlainSample(row, "", source, last, decoded, len(response), None, {}, arguments)
