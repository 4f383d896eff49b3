# pyright: basic, reportGeneralTypeIssues=false, reportOptionalContextManager=false
"""Reward managers and scorers as verl's users write them: only the import line names another package."""

import asyncio
import re
import signal
import threading
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch

from trivium.frontdoors.verl import (
    AbstractRewardManager,
    DAPORewardManager,
    DataProto,
    NaiveRewardManager,
    RawRewardFn,
    RewardManagerBase,
    default_compute_score,
    register,
)

# --------------------------------------------------------------------------- scorers


def contains(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0 if ground_truth in solution_str else 0.0


def format_and_accuracy(data_source, solution_str, ground_truth, extra_info=None, format_weight=0.1):
    shaped = re.match(r"^<think>.*</think>\s*<answer>.*</answer>$", solution_str, re.DOTALL) is not None
    found = re.findall(r"<answer>(.*?)</answer>", solution_str, re.DOTALL)
    right = bool(found) and found[-1].strip() == ground_truth
    return {"score": (1 - format_weight) * right + format_weight * shaped, "acc": right, "format": shaped}


def sandboxed(
    data_source,
    solution_str,
    ground_truth,
    extra_info=None,
    sandbox_fusion_url=None,
    concurrent_semaphore=None,
    memory_limit_mb=None,
):
    assert sandbox_fusion_url == "http://sandbox.example/run_code"
    with concurrent_semaphore or threading.Semaphore(1):
        return {"score": float(memory_limit_mb == 512), "acc": True}


async def judged_later(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0)
    return {"score": float(ground_truth in solution_str), "judge": "later"}


def batch_score(data_sources, solution_strs, ground_truths, extra_infos, scale=1.0):
    assert len(data_sources) == len(extra_infos)
    return [{"score": scale * (t in s), "n": len(s)} for s, t in zip(solution_strs, ground_truths, strict=True)]


def with_alarm(data_source, solution_str, ground_truth, extra_info=None):
    """Whatever goes wrong is a 0, as in many graders."""
    try:

        def late(number, frame):
            raise TimeoutError

        signal.signal(signal.SIGALRM, late)
        signal.alarm(30)
        try:
            return contains(data_source, solution_str, ground_truth)
        finally:
            signal.alarm(0)
    except Exception:
        return 0.0


def pair(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "raise":
        raise ValueError("no parse")
    return ground_truth in solution_str, "detail"


# --------------------------------------------------------------------------- managers of 2024 and 2025


class DenseRewardManager:
    """A reward on every token, and nothing else about it; without `reward_fn_key`, as the first managers were."""

    def __init__(self, tokenizer, num_examine, compute_score=None):
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score or default_compute_score

    def __call__(self, data: DataProto, return_dict=False):
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        for i in range(len(data)):
            item = data[i]
            prompt_length = item.batch["prompts"].shape[-1]
            length = item.batch["attention_mask"][prompt_length:].sum()
            rewards[i, :length] = 1.0 / length
        return {"reward_tensor": rewards} if return_dict else rewards


@register("by_item")
class ByItemRewardManager(AbstractRewardManager):
    """The usual loop over samples, with printing and columns."""

    def __init__(self, tokenizer, num_examine, compute_score: RawRewardFn | None, reward_fn_key="data_source", bonus=0):
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score or default_compute_score
        self.reward_fn_key = reward_fn_key
        self.bonus = bonus

    def __call__(self, data: DataProto, return_dict: bool = False):
        given = self._extract_reward_from_rm_scores(data, return_dict)
        if given is not None:
            return given
        reward_tensor = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        reward_extra_info = defaultdict(list)
        printed = {}
        for i in range(len(data)):
            item = data[i]
            prompt_ids = item.batch["prompts"]
            prompt_length = prompt_ids.shape[-1]
            valid_prompt = prompt_ids[-item.batch["attention_mask"][:prompt_length].sum() :]
            valid_length = item.batch["attention_mask"][prompt_length:].sum()
            solution = self.tokenizer.decode(item.batch["responses"][:valid_length], skip_special_tokens=True)
            truth = item.non_tensor_batch["reward_model"]["ground_truth"]
            source = item.non_tensor_batch[self.reward_fn_key]
            extra_info = item.non_tensor_batch.get("extra_info", {})
            extra_info["num_turns"] = item.non_tensor_batch.get("__num_turns__", None)
            extra_info["rollout_reward_scores"] = item.non_tensor_batch.get("reward_scores", {})
            score = self.compute_score(
                data_source=source, solution_str=solution, ground_truth=truth, extra_info=extra_info
            )
            if isinstance(score, dict):
                reward = score["score"]
                for key, value in score.items():
                    reward_extra_info[key].append(value)
            else:
                reward = score
                reward_extra_info["acc"].append(reward)
            reward_extra_info["prompt_length"].append(len(valid_prompt))
            reward_tensor[i, valid_length - 1] = reward + self.bonus
            if printed.setdefault(source, 0) < self.num_examine:
                printed[source] += 1
                print("[response]", solution)  # noqa: T201
        if return_dict:
            return {"reward_tensor": reward_tensor, "reward_extra_info": reward_extra_info}
        return reward_tensor


class PooledRewardManager(DenseRewardManager):
    """Processes of its own, as PRIME's manager has."""

    def __call__(self, data, return_dict=False):
        texts = self.tokenizer.batch_decode(data.batch["responses"], skip_special_tokens=True)
        truths = [item.non_tensor_batch["reward_model"]["ground_truth"] for item in data]
        sources = data.non_tensor_batch["data_source"]
        scores = asyncio.run(self._all(sources, texts, truths))
        prompt_length = data.batch["prompts"].shape[-1]
        lengths = data.batch["attention_mask"][:, prompt_length:].sum(dim=-1)
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        rewards[torch.arange(len(data)), lengths - 1] = torch.tensor(scores, dtype=torch.float32)
        data.batch["acc"] = torch.tensor(scores)
        return {"reward_tensor": rewards, "reward_extra_info": {"acc": scores}} if return_dict else rewards

    async def _all(self, sources, texts, truths):
        loop = asyncio.get_running_loop()
        with ProcessPoolExecutor(max_workers=2) as pool:
            calls = [
                loop.run_in_executor(pool, partial(self.compute_score, source, text, truth, None))
                for source, text, truth in zip(sources, texts, truths, strict=True)
            ]
            return await asyncio.wait_for(asyncio.gather(*calls), timeout=300.0)


class RelativeRewardManager(DenseRewardManager):
    """Compares the responses to one prompt; tells training from validation."""

    def __call__(self, data, return_dict=False):
        prompt_length = data.batch["prompts"].shape[1]
        lengths = data.batch["attention_mask"][:, prompt_length:].sum(-1)
        by_prompt = defaultdict(list)
        for i, uid in enumerate(data.non_tensor_batch["uid"]):
            by_prompt[uid].append(i)
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        for rows in by_prompt.values():
            shortest = min(lengths[i].item() for i in rows)
            for i in rows:
                rewards[i, lengths[i] - 1] = float(lengths[i] == shortest)
        info = {"validating": [bool(data.meta_info.get("validate", False))] * len(data)}
        return {"reward_tensor": rewards, "reward_extra_info": info} if return_dict else rewards


class LimitedRewardManager(ByItemRewardManager):
    """A time limit around the whole loop."""

    def __call__(self, data, return_dict=False):
        def late(number, frame):
            raise TimeoutError("scoring takes too long")

        before = signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, 60.0)
        try:
            return super().__call__(data, return_dict)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)


# --------------------------------------------------------------------------- managers of 2026


@register("single")
class SingleRewardManager(RewardManagerBase):
    def __init__(self, config, tokenizer, compute_score, reward_router_address=None, reward_model_tokenizer=None):
        super().__init__(config, tokenizer, compute_score)
        self.compute_score = compute_score or default_compute_score
        self.is_async = asyncio.iscoroutinefunction(self.compute_score)
        self.bonus = config.reward.get("reward_kwargs", {}).get("bonus", 0.0)

    async def run_single(self, data: DataProto) -> dict:
        data = data[-1:]
        item = data[0]
        response_ids = item.batch["responses"]
        length = item.batch["attention_mask"][-response_ids.shape[-1] :].sum()
        truth = item.non_tensor_batch["reward_model"]["ground_truth"]
        extra_info = item.non_tensor_batch.get("extra_info", {})
        text = await self.loop.run_in_executor(
            None, lambda: self.tokenizer.decode(response_ids[:length], skip_special_tokens=True)
        )
        call = partial(
            self.compute_score,
            data_source=item.non_tensor_batch["data_source"],
            solution_str=text,
            ground_truth=truth,
            extra_info=extra_info,
        )
        result = await call() if self.is_async else await self.loop.run_in_executor(None, call)
        if isinstance(result, dict):
            return {"reward_score": result["score"] + self.bonus, "reward_extra_info": dict(result)}
        return {"reward_score": result + self.bonus, "reward_extra_info": {"acc": result}}


class RateLimitedRewardManager(SingleRewardManager):
    """Shares a semaphore between all managers of the class."""

    _semaphore = None
    most = inside = 0

    @classmethod
    def init_class(cls, config, tokenizer):
        if cls._class_initialized:
            return
        super().init_class(config, tokenizer)
        cls._semaphore = asyncio.Semaphore(2)

    async def run_single(self, data):
        async with self._semaphore:
            type(self).inside += 1
            type(self).most = max(self.most, self.inside)
            await asyncio.sleep(0.001)
            type(self).inside -= 1
            return await super().run_single(data)


class TokenLevelRewardManager(SingleRewardManager):
    """Puts its scores where it likes."""

    @classmethod
    def assemble_rm_scores(cls, data, scores):
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        rewards[:, 0] = torch.tensor(scores)
        return rewards


@register("bonus")
class BonusRewardManager(NaiveRewardManager):
    """The one that ships, and a bonus for what is not empty."""

    def __init__(self, config, tokenizer, compute_score, reward_router_address=None, reward_model_tokenizer=None):
        super().__init__(config, tokenizer, compute_score, reward_router_address, reward_model_tokenizer)
        self.bonus = self.config.reward.reward_kwargs.bonus

    async def run_single(self, data):
        result = await super().run_single(data)
        return {**result, "reward_score": result["reward_score"] + self.bonus}


@register("shorter")
class ShorterRewardManager(DAPORewardManager):
    def __init__(self, config, tokenizer, compute_score, **kwargs):
        super().__init__(config=config, tokenizer=tokenizer, compute_score=compute_score, **kwargs)
