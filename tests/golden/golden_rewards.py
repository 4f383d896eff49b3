"""Golden answers: graders of final answers, and what length does to a reward."""

import pytest
import torch
from golden_runners import Arguments, answers, section

from trivium.algorithms import ShapingInputs
from trivium.algorithms.metadata import ShapingMetadata, resolve_function
from trivium.frontdoors.verl import BatchView, DAPORewardManager, default_compute_score
from trivium.rewards.functions import gsm8k_answer, gsm8k_score
from trivium.rewards.graders.mathematics import math_boxed, math_dapo


@answers("rewards", "gsm8k_strict", "gsm8k_flexible")
def _gsm8k_answer(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return {"answer": gsm8k_answer(inputs["text"], kwargs["method"])}


@answers("rewards", "gsm8k_score")
def _gsm8k_score(inputs: Arguments, kwargs: Arguments) -> Arguments:
    score = gsm8k_score(inputs["text"], inputs["ground_truth"], kwargs["method"], kwargs["format_score"])
    if kwargs["method"] == "strict":
        full = default_compute_score("openai/gsm8k", inputs["text"], inputs["ground_truth"])
        assert full == (score if score == 1 else 0)
    return {"score": score * kwargs["score"]}


@answers("rewards", "math_dapo")
def _math_dapo(inputs: Arguments, kwargs: Arguments) -> Arguments:
    found = default_compute_score("math_dapo", inputs["text"], inputs["ground_truth"])
    assert isinstance(found, dict)
    return {"correct": found["acc"], "score": found["score"], "pred": found["pred"]}


@answers("rewards", "math_dapo_strict_box")
def _math_dapo_strict_box(inputs: Arguments, kwargs: Arguments) -> Arguments:
    found = math_dapo(inputs["text"], inputs["ground_truth"], strict_box=kwargs["strict_box_verify"])
    return {"correct": found["acc"], "score": found["score"], "pred": found["pred"]}


@answers("rewards", "math_boxed")
def _math_boxed(inputs: Arguments, kwargs: Arguments) -> Arguments:
    right = math_boxed(inputs["text"], inputs["ground_truth"])
    assert default_compute_score("lighteval/MATH", inputs["text"], inputs["ground_truth"]) == right
    return {"correct": right}


@answers("rewards", "math_verify")
def _math_verify(inputs: Arguments, kwargs: Arguments) -> Arguments:
    pytest.importorskip("math_verify")
    return {"correct": default_compute_score("math_verify", inputs["text"], inputs["ground_truth"]) == 1}


class _Letters:
    """Any ids are text."""

    eos_token = "z"

    def decode(self, ids: torch.Tensor, skip_special_tokens: bool) -> str:
        return "a" * len(ids)


@answers("rewards", "overlong_penalty")
def _overlong_penalty(inputs: Arguments, kwargs: Arguments) -> Arguments:
    """What the manager takes off, which is what the shaping of the same name takes off."""
    lengths, longest, factor = inputs["lengths"], kwargs["max_resp_len"], kwargs["penalty_factor"]
    manager = DAPORewardManager(
        _Letters(),
        0,
        lambda **sample: 2.0,
        max_resp_len=longest,
        overlong_buffer_cfg={"enable": True, "len": kwargs["buffer_len"], "penalty_factor": factor, "log": True},
    )
    rows, width = len(lengths), int(lengths.max())
    attention = torch.cat([torch.ones(rows, 1), torch.arange(width) < lengths[:, None]], dim=1).long()
    ids = torch.ones(rows, width).long()
    columns = {"data_source": ["any"] * rows, "reward_model": [{"ground_truth": ""}] * rows}
    tensors = {"prompts": ids[:, :1], "responses": ids, "attention_mask": attention}
    found = manager(BatchView.from_dict(tensors, columns), return_dict=True)
    assert isinstance(found, dict)
    penalty = found["reward_tensor"].sum(-1) - 2.0
    assert found["reward_extra_info"]["overlong"] == (penalty < 0).tolist()
    shape, _ = resolve_function(
        "shapings",
        section("shapings", "overlong_penalty", factor=factor, buffer=kwargs["buffer_len"] / longest),
        ShapingMetadata,
    )
    nothing = torch.zeros(rows)
    shaped = shape(ShapingInputs(nothing.double(), lengths, nothing.bool(), nothing.long(), longest))
    torch.testing.assert_close(penalty.double(), shaped, rtol=1e-6, atol=1e-6)
    at_last = found["reward_tensor"].nonzero()[:, 1].tolist() == (lengths - 1).tolist()
    return {"penalty": penalty, "at_last_token": at_last}


@answers("rewards", "stop_properly_penalty")
def _stop_properly_penalty(inputs: Arguments, kwargs: Arguments) -> Arguments:
    shape, _ = resolve_function(
        "shapings", section("shapings", "truncation_penalty", coef=kwargs["coef"]), ShapingMetadata
    )
    rewards, truncated = inputs["rewards"].double(), inputs["truncated"].bool()
    some = torch.ones(len(rewards)).long()
    return {"rewards": shape(ShapingInputs(rewards, some, truncated, some, 1))}
