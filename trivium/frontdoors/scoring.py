"""Rewards as the original gives them: a reward manager sees everything that was played for a step, at once."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np
import torch
from pydantic import PrivateAttr

from trivium.buffers.strategies import DefaultStrategy
from trivium.errors import ConfigError, RewardError
from trivium.rewards.batch_view import BatchView, living, scored_rows
from trivium.rewards.loading import compute_reward
from trivium.types import Batch, Group, Sample, Trajectory, experiences_of

_KIND = "trivium.frontdoors.scoring:Judged"
Extras = Mapping[str, Any]
"""What a reward manager said of one trajectory beside its reward."""


@dataclass(frozen=True)
class Scoring:
    """Groups that nobody judged, judged together."""

    manager: Callable[..., Any]
    """Called with a BatchView and `return_dict=True`."""
    pad_token_id: int
    model: Callable[[Batch], list[float]] | None = None
    """The reward model's scores, which the manager finds as `rm_scores`; None where there is none."""

    def __call__(self, groups: Sequence[Group], **meta: Any) -> tuple[list[Group], list[Extras]]:
        """(the groups with rewards, what else was said of each living member, in order). `meta` becomes `meta_info`.

        Raises as `compute_reward` does, and DataError where the manager does not give one finite reward for each.
        """
        played = [*groups, *(_greedy(group) for group in groups if group.greedy is not None)]
        view = BatchView.of(played, self.pad_token_id, meta_info=meta)
        if not len(view):
            return list(groups), []
        if self.model is not None:
            self._add_model_scores(view, played)
        rewards, extra = compute_reward(view, self.manager)
        rows = scored_rows(rewards, view, extra)
        by_member = {
            (id(group), member.index): _rewarded(member, row.score, row.extra)
            for (group, member), row in zip(living(played), rows, strict=True)
        }
        greedy = {
            id(group.greedy): by_member.get((id(twin), twin.trajectories[0].index))
            for group, twin in zip((g for g in groups if g.greedy is not None), played[len(groups) :], strict=True)
        }
        judged = [
            replace(
                group, trajectories=tuple(by_member.get((id(group), t.index), t) for t in group.trajectories),
                greedy=greedy.get(id(group.greedy)) or group.greedy,
            )
            for group in groups
        ]  # fmt: skip
        return judged, [row.extra for row in rows[: len(living(groups))]]

    def _add_model_scores(self, view: BatchView, played: Sequence[Group]) -> None:
        """The score of the last sequence of each trajectory, on its last response token; none where it said nothing."""
        assert self.model is not None
        rows = view.response_lengths.nonzero().flatten()
        table, members = torch.zeros(view.batch["responses"].shape), living(played)
        if len(rows):
            scores = self.model(Batch(tuple(experiences_of(*members[row])[-1] for row in rows.tolist())))
            table[rows, view.response_lengths[rows] - 1] = torch.tensor(scores, dtype=torch.float32)
        view.batch["rm_scores"] = table


def _greedy(group: Group) -> Group:
    """A group of its greedy playing alone."""
    return replace(group, trajectories=group.played[-1:], greedy=None)


def _rewarded(member: Trajectory, score: float, extra: Extras) -> Trajectory:
    """The member with its reward. Numbers among the extras are logged under `workflow/`."""
    numbers = {
        name: number for name, value in extra.items() if name != "score" and (number := number_of(value)) is not None
    }
    return replace(member, rewards={**member.rewards, "reward": score}, metrics={**member.metrics, **numbers})


def number_of(value: Any) -> float | None:
    """A finite number among what a manager says, which alone can be logged and averaged; None for all else."""
    try:
        number = float(value) if isinstance(value, Real | np.bool_ | np.number) else math.nan
    except OverflowError:  # an integer beyond what a float holds
        return None
    return number if math.isfinite(number) else None


class Judged(DefaultStrategy):
    """The groups that the buffer has ready, judged together when a step takes them."""

    judges = True
    """Explorers need not judge what they play."""

    class Config(DefaultStrategy.Config):
        """How a saved run says that a script's `reward_fn` judged."""

        kind: str = _KIND
        _scoring: Scoring | None = PrivateAttr(default=None)

        @classmethod
        def by(cls, scoring: Scoring) -> Judged.Config:
            """The section that stands for this scoring."""
            config = cls(kind=_KIND)  # said: what is not said does not travel
            config._scoring = scoring
            return config

    def __init__(self, config: Config, **beside: Any) -> None:
        super().__init__(config, **beside)
        if config._scoring is None:
            raise ConfigError(
                "the reward_fn of a run that a RayPPOTrainer began", "it exists in the script that made it",
                "build the RayPPOTrainer again and call fit()",
            )  # fmt: skip
        self._scoring = config._scoring

    async def sample(self, count: int, version: int) -> Sample:
        sample = await super().sample(count, version)
        groups, _ = await asyncio.to_thread(self._scoring, sample.groups, global_steps=version + 1, validate=False)
        return replace(sample, groups=tuple(groups))


# --------------------------------------------------------------------------- managers


def as_manager(reward_fn: Any, tokenizer: Any) -> Callable[..., Any]:
    """A reward manager, whatever of these is given: a manager, `compute_score(data_source, solution_str, ground_truth,
    extra_info)`, or `f(prompt, completion, **columns)`."""
    if not callable(reward_fn):
        raise ConfigError(
            "a reward_fn", f"a {type(reward_fn).__name__}", "pass a reward manager, or a function that scores one reply"
        )
    names = set(inspect.signature(reward_fn).parameters)
    if "solution_str" in names:
        from trivium.rewards import NaiveRewardManager

        return NaiveRewardManager(tokenizer, num_examine=0, compute_score=reward_fn)
    return PlainReward(reward_fn, tokenizer) if {"prompt", "completion"} <= names else reward_fn


class PlainReward:
    """`f(prompt, completion, **columns) -> float` as a reward manager: columns arrive by the names it asks for."""

    def __init__(self, function: Callable[..., Any], tokenizer: Any) -> None:
        self._function, self._tokenizer = function, tokenizer
        self._parameters = inspect.signature(function).parameters

    def __call__(self, data: BatchView, return_dict: bool = False) -> Any:
        rewards = torch.zeros(data.batch["responses"].shape, dtype=torch.float32)
        for row, (item, length) in enumerate(zip(data, data.response_lengths.tolist(), strict=True)):
            rewards[row, max(0, length - 1)] = self._score(row, item, length)
        return {"reward_tensor": rewards, "reward_extra_info": {}} if return_dict else rewards

    def _score(self, row: int, item: Any, length: int) -> float:
        said = [message["content"] for message in item.non_tensor_batch["raw_prompt"] if message["role"] == "user"]
        text = self._tokenizer.decode(item.batch["responses"][:length], skip_special_tokens=True)
        columns = self._columns(item.non_tensor_batch)
        what = f"a finite reward of sample {row} (data source {item.non_tensor_batch['data_source']!r})"
        mend = "mend the reward function: no sample is scored in silence"
        try:
            score = float(self._function(prompt=said[-1] if said else "", completion=text, **columns))
        except Exception as error:
            raise RewardError(what, f"{type(error).__name__}: {error}", mend) from error
        if not math.isfinite(score):
            raise RewardError(what, str(score), mend)
        return score

    def _columns(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        if any(p.kind is p.VAR_KEYWORD for p in self._parameters.values()):
            return {name: value for name, value in columns.items() if name not in ("prompt", "completion")}
        return {name: columns[name] for name in self._parameters if name in columns}
