"""What a user of verl's trainer writes beside the driver: a dataset, a sampler that learns, an estimator, a loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch.utils.data import Dataset

from trivium.frontdoors.verl import AbstractCurriculumSampler, agg_loss, register_adv_est, register_policy_loss


class Pairs(Dataset[Any]):
    """Pairs of digits, made up here: `data_files` names how many."""

    def __init__(self, data_files: Any, tokenizer: Any, config: Any, processor: Any = None) -> None:
        assert tokenizer.pad_token_id is not None
        assert config["train_batch_size"]
        self.rows = [
            {
                "data_source": "pairs",
                "prompt": [{"role": "user", "content": f"{number % 10},{number // 10}"}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(max(number % 10, number // 10))},
                "extra_info": {"index": number},
            }
            for number in range(int(str(data_files).rpartition("-")[2]))
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


class Hardest(AbstractCurriculumSampler):
    """Visits next what was rewarded least."""

    seen: ClassVar[list[Any]] = []
    """Every batch that any of them was given."""

    def __init__(self, data_source: Any, data_config: Any) -> None:
        self.rewards, self.left = [0.0] * len(data_source), list[int]()

    def __len__(self) -> int:
        return len(self.rewards)

    def __iter__(self) -> Iterator[int]:
        self.left = self.left or list(range(len(self.rewards)))
        while self.left:
            place = min(self.left, key=lambda place: (self.rewards[place], place))
            self.left.remove(place)
            yield place

    def update(self, batch: Any) -> None:
        self.seen.append(batch)
        for info, score in zip(batch.non_tensor_batch["extra_info"], batch.batch["token_level_scores"], strict=True):
            self.rewards[info["index"]] += float(score.sum()) + info["index"] % 3

    def state_dict(self) -> dict[str, Any]:
        return {"rewards": torch.tensor(self.rewards, dtype=torch.float64), "left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rewards, self.left = state["rewards"].tolist(), state["left"]


@register_adv_est("mine")
def my_advantages(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Any, config: Any = None, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """GRPO, member by member."""
    scores = token_level_rewards.sum(-1)
    advantages = torch.zeros_like(scores)
    for name in set(index):
        rows = torch.tensor([other == name for other in index])
        of_group = scores[rows]
        advantages[rows] = (of_group - of_group.mean()) / (of_group.std() + config.get("my_epsilon", 1e-6))
    spread = advantages.unsqueeze(-1) * response_mask
    return spread, spread


@register_policy_loss("mine")
def my_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """PPO with the dual clip."""
    low, high, dual = config.clip_ratio, config.policy_loss.get("my_clip_high", config.clip_ratio), config.clip_ratio_c
    ratio = (log_prob - old_log_prob).exp()
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * dual), losses)
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    return agg_loss(losses, response_mask, loss_agg_mode), {"mine/ratio_max": ratio[response_mask].max().item()}
