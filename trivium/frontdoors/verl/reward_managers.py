"""verl's reward managers. A manager takes a batch and puts one reward on the last token of each response.

`manager(data)` returns a tensor (B, R); `manager(data, return_dict=True)` returns `{"reward_tensor": ...,
"reward_extra_info": {name: B values}}`. If a batch has `rm_scores`, they are its rewards.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from trivium.algorithms.shaping import overlong_fraction
from trivium.foundation.concurrency import usable_cores
from trivium.foundation.errors import ConfigError, DataError
from trivium.frontdoors.plain_values import plain, read, unescaped
from trivium.frontdoors.reward_calls import OnError, Result, Scorer
from trivium.frontdoors.verl.objects.batches.batch_view import BatchView
from trivium.frontdoors.verl.objects.batches.protocol import as_columns
from trivium.frontdoors.verl.rewards.reward_bases import (
    AbstractRewardManager,
    RawRewardFn,
    each_single,
    get_event_loop,
)
from trivium.frontdoors.verl.rewards.scorer import RewardSample, default_compute_score
from trivium.models.late import torch

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger("trivium")


def _of_a_config(
    config: Any,
    tokenizer: Any,
    compute_score: Any,
    reward_router_address: Any = None,
    reward_model_tokenizer: Any = None,
) -> None:
    """The arguments of these managers from verl 0.7 on, with options in `config.reward.reward_kwargs`."""


def _either_arguments(init: Callable[..., None]) -> Callable[..., None]:
    """Wraps a constructor so that it accepts the arguments of both kinds of managers."""
    named_options = set(inspect.signature(init).parameters)

    @functools.wraps(init)
    def construct(self: Any, *arguments: Any, **named: Any) -> None:
        # The second argument is `num_examine` up to verl 0.6, and the tokenizer since.
        has_tokenizer_second = len(arguments) > 1 and not isinstance(arguments[1], int)
        if "config" not in named and not has_tokenizer_second and not (arguments and "tokenizer" in named):
            init(self, *arguments, **named)
            return
        bound = inspect.signature(_of_a_config).bind(*arguments, **named)
        bound.apply_defaults()
        vars(self).update(bound.arguments)
        options = unescaped(plain(read(read(bound.arguments["config"], "reward", {}), "reward_kwargs", {})))
        options = {name: value for name, value in options.items() if name in named_options}
        init(self, bound.arguments["tokenizer"], 0, bound.arguments["compute_score"], **options)
        self.is_async_reward_score = inspect.iscoroutinefunction(self.compute_score)

    return construct


class NaiveRewardManager(AbstractRewardManager):
    """Scores each response separately.

    The manager prints and logs `num_examine` samples per data source and batch. `reward_fn_key` is the column with the
    data source of a task. If the scorer raises, exceeds `deadline_s` or returns no finite number, the manager raises a
    RewardError that names the sample. With a number as `on_error`, the sample gets that reward instead, and the columns
    `reward_failed` and `reward_error` of the extra information record the error. A sample that exceeds
    `compute_score_timeout` seconds gets the reward 0 in the same way. `workers`: see `trivium.frontdoors.reward_calls`.

    A subclass written for verl 0.7 or later passes `(config, tokenizer, compute_score)` instead. It may override
    `run_single`, which then scores each sample.
    """

    config: Any
    """The config, if one was passed."""
    default_on_error: ClassVar[OnError] = "raise"
    """What `on_error` is if it is None."""
    _scores_empty = False
    """Whether an empty response has a reward, on the first place of its row."""
    loop = property(lambda self: get_event_loop())
    """The event loop that `run_single` runs in."""

    @_either_arguments
    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_examine: int,
        compute_score: RawRewardFn | None = None,
        reward_fn_key: str = "data_source",
        *,
        compute_score_timeout: float | None = None,
        deadline_s: float = 300.0,
        workers: int = 0,
        on_error: OnError | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = default_compute_score if compute_score is None else compute_score
        self.reward_fn_key = reward_fn_key
        self.compute_score_timeout = compute_score_timeout
        on_error = self.default_on_error if on_error is None else on_error
        self._scorer = self._make_scorer(compute_score_timeout or deadline_s, workers, on_error)
        self._counts_errors = on_error != "raise" or bool(compute_score_timeout)

    def _make_scorer(self, deadline_s: float, workers: int, on_error: OnError) -> Scorer:
        on_timeout = 0.0 if self.compute_score_timeout else on_error
        return Scorer(self.compute_score, deadline_s, workers, on_error, on_timeout)

    def __call__(self, data: BatchView, return_dict: bool = False) -> Tensor | dict[str, Any]:
        """Returns rewards (B, R) float32, zero except on the last token of each response. The row of an empty response
        stays zero, with a warning in the log."""
        if type(self).run_single is not NaiveRewardManager.run_single:
            return each_single(self, data, return_dict)
        model_scores = self._extract_reward_from_rm_scores(data, return_dict)
        if model_scores is not None:
            return model_scores
        samples = self._samples(data)
        results = self._results(samples, data)
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        extras: list[Mapping[str, Any]] = []
        for sample, result in zip(samples, results, strict=True):
            reward, entries = self._reward(sample, result) if result.error is None else (result.score, {})
            extras.append(entries)
            if sample.length or self._scores_empty:
                rewards[sample.row, max(0, sample.length - 1)] = reward
        extra = as_columns(extras) | self._errors(results)
        self._examine(samples, results)
        return {"reward_tensor": rewards, "reward_extra_info": extra} if return_dict else rewards

    async def run_single(self, data: BatchView) -> dict[str, Any]:
        """Returns `{"reward_score": number, "reward_extra_info": {name: value}}` for the last sample of the batch."""
        (sample,) = self._samples(data[-1:])
        result = await self._scorer.one(sample)
        reward, extra = self._reward(sample, result) if result.error is None else (result.score, {})
        return {"reward_score": reward, "reward_extra_info": dict(extra) or {"acc": result.score}}

    def _results(self, samples: Sequence[RewardSample], data: BatchView) -> list[Result]:
        """Returns the scorer's result for each sample."""
        return self._scorer.each(samples)

    def _reward(self, sample: RewardSample, result: Result) -> tuple[float, Mapping[str, Any]]:
        """Returns the reward of a sample and its extra information."""
        return result.score, result.extra

    def _text(self, text: str) -> str:
        """Returns the response text that the scorer receives."""
        return text

    def _samples(self, data: BatchView) -> list[RewardSample]:
        prompts, attention = data.batch["prompts"], data.batch["attention_mask"].bool()
        width = prompts.shape[-1]
        return [
            self._sample(
                row,
                data[row].non_tensor_batch,
                prompts[row][attention[row, :width]],
                data.batch["responses"][row][attention[row, width:]],
            )
            for row in range(len(data))
        ]

    def _sample(self, row: int, columns: Mapping[str, Any], prompt: Tensor, response: Tensor) -> RewardSample:
        source, model = columns.get(self.reward_fn_key), columns.get("reward_model")
        if source is None or not isinstance(model, Mapping) or "ground_truth" not in model:
            raise DataError(
                f"sample {row} with {self.reward_fn_key!r} and 'reward_model' {{ground_truth}}",
                f"{self.reward_fn_key}: {source!r}, reward_model: {model!r}; there are {', '.join(columns)}",
                "map columns to these names in the task source",
            )
        extra = dict(columns.get("extra_info") or {}) | {
            "num_turns": columns.get("__num_turns__"),
            "rollout_reward_scores": columns.get("reward_scores") or {},
        }
        decode = self.tokenizer.decode
        return RewardSample(
            row,
            str(columns.get("uid", "")),
            str(source),
            str(decode(prompt, skip_special_tokens=True)),
            self._text(str(decode(response, skip_special_tokens=True))),
            len(response),
            model["ground_truth"],
            extra,
        )

    def _errors(self, results: Sequence[Result]) -> dict[str, list[Any]]:
        if not self._counts_errors:
            return {}
        failed = [result.error for result in results if result.error is not None]
        if failed:
            _log.warning("%d of %d samples could not be scored; the first:\n%s", len(failed), len(results), failed[0])
        return {
            "reward_failed": [result.error is not None for result in results],
            "reward_error": ["" if result.error is None else str(result.error) for result in results],
        }

    def _examine(self, samples: Sequence[RewardSample], results: Sequence[Result]) -> None:
        examined: Counter[str] = Counter()
        for sample, result in zip(samples, results, strict=True):
            if not sample.length and not self._scores_empty:
                _log.warning("%s has an empty response: no token holds its score %g", sample.name, result.score)
            if examined[sample.data_source] < self.num_examine:
                examined[sample.data_source] += 1
                score = dict(result.extra) or result.score
                shown_text = (
                    f"{sample.name}\n[prompt] {sample.prompt}\n[response] {sample.response}\n"
                    f"[ground truth] {sample.ground_truth}\n[score] {score}"
                )
                _log.info("%s", shown_text)
                sys.stdout.write(f"{shown_text}\n")  # verl's users look at the terminal


def _overlong_penalty(length: int, max_resp_len: int, buffer: int, factor: float) -> float:
    """Returns the penalty (at most 0) for a response of this length. `buffer` is in tokens."""
    return 0.0 - factor * float(overlong_fraction(torch.tensor(length), max_resp_len, buffer))


class DAPORewardManager(NaiveRewardManager):
    """Scores each response separately, and subtracts a penalty from responses near the length limit.

    `overlong_buffer_cfg` is None, or a mapping or object with `enable`, `len`, `penalty_factor` and `log`. `log` adds
    `overlong_reward` and `overlong` to the extra information. `max_resp_len` is the length limit in tokens. If the
    scorer returns a number, the extra information contains it as `acc`.
    """

    @_either_arguments
    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_examine: int,
        compute_score: RawRewardFn | None = None,
        reward_fn_key: str = "data_source",
        max_resp_len: int | None = None,
        overlong_buffer_cfg: object = None,
        *,
        deadline_s: float = 300.0,
        workers: int = 0,
        on_error: OnError | None = None,
    ) -> None:
        super().__init__(
            tokenizer,
            num_examine,
            compute_score,
            reward_fn_key,
            deadline_s=deadline_s,
            workers=workers,
            on_error=on_error,
        )
        self.max_resp_len = max_resp_len
        self.overlong_buffer_cfg = overlong_buffer_cfg
        self._buffer = 0
        if overlong_buffer_cfg is not None and read(overlong_buffer_cfg, "enable", True):
            self._buffer = int(read(overlong_buffer_cfg, "len", 0))
            self._factor = float(read(overlong_buffer_cfg, "penalty_factor", 1.0))
            self._logs = bool(read(overlong_buffer_cfg, "log", False))
            if max_resp_len is None or not 0 < self._buffer <= max_resp_len or self._factor < 0:
                raise ConfigError(
                    "an overlong buffer within the longest response",
                    f"len {self._buffer}, max_resp_len {max_resp_len}, penalty_factor {self._factor}",
                    "set 0 < overlong_buffer_cfg.len <= max_resp_len and penalty_factor >= 0, or enable: false",
                )

    def _text(self, text: str) -> str:
        # As verl's manager does; its others leave it.
        return text.removesuffix(getattr(self.tokenizer, "eos_token", None) or "")

    def _reward(self, sample: RewardSample, result: Result) -> tuple[float, Mapping[str, Any]]:
        extra = dict(result.extra) or {"acc": result.score}
        if not self._buffer or self.max_resp_len is None:
            return result.score, extra
        penalty = _overlong_penalty(sample.length, self.max_resp_len, self._buffer, self._factor)
        if self._logs:
            extra |= {"overlong_reward": penalty, "overlong": penalty < 0}
        return result.score + penalty, extra


class BatchRewardManager(NaiveRewardManager):
    """Scores all responses in one call: `f(data_sources=, solution_strs=, ground_truths=, extra_infos=, **options)`.

    The scorer returns one number or dict per sample. `deadline_s` limits the whole call; `reward_kwargs` are its
    options. The manager stores the scores in the batch as `acc` (B,).
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_examine: int,
        compute_score: RawRewardFn,
        reward_fn_key: str = "data_source",
        *,
        deadline_s: float = 300.0,
        workers: int = 0,
        on_error: OnError | None = None,
        **reward_kwargs: object,
    ) -> None:
        super().__init__(
            tokenizer,
            num_examine,
            compute_score,
            reward_fn_key,
            deadline_s=deadline_s,
            workers=workers,
            on_error=on_error,
        )
        self.reward_kwargs = reward_kwargs

    def _results(self, samples: Sequence[RewardSample], data: BatchView) -> list[Result]:
        results = self._scorer.together(samples, self.reward_kwargs)
        data.batch["acc"] = torch.tensor([result.score for result in results], dtype=torch.float32)
        return results


class PrimeRewardManager(NaiveRewardManager):
    """Scores the responses in parallel, each in a process: `f(data_source, solution_str, ground_truth, extra_info)`,
    called with positional arguments, returns a number or a sequence that begins with one.

    If a call raises or exceeds `deadline_s`, the sample gets the reward `on_error`; the extra information and the log
    record the error. The manager stores the scores in the batch as `acc` (B,).
    """

    # As verl's manager, which gives 0 to calls that fail or take too long.
    default_on_error = 0.0

    def _make_scorer(self, deadline_s: float, workers: int, on_error: OnError) -> Scorer:
        # In forks of this process, because a scorer may be a closure, which no other process can import.
        function = functools.partial(_first_of, self.compute_score)
        return Scorer(function, deadline_s, on_error=on_error, on_timeout=on_error, forks=workers or usable_cores())

    def verify(self, data: BatchView) -> list[float]:
        """Returns the scores of a batch, and stores them in the batch as `acc`."""
        return [result.score for result in self._results(self._samples(data), data)]

    def _results(self, samples: Sequence[RewardSample], data: BatchView) -> list[Result]:
        results = super()._results(samples, data)
        data.batch["acc"] = torch.tensor([result.score for result in results], dtype=torch.float32)
        return results


async def _first_of(
    function: RawRewardFn, data_source: str, solution_str: str, ground_truth: object, extra_info: object
) -> Any:
    result = function(data_source, solution_str, ground_truth, extra_info)
    result = await result if inspect.isawaitable(result) else result
    return result[0] if isinstance(result, Sequence) and not isinstance(result, str) else result
