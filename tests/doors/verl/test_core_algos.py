"""verl's core_algos, rollout_corr_helper and steps: the golden values through verl's own names and arguments."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from failing import refused

from trivium.errors import ConfigError, DataError
from trivium.frontdoors.verl import (
    AdvantageEstimator,
    DataProto,
    core_algos,
    rollout_corr_helper,
)
from trivium.frontdoors.verl.objects.algorithms.core_algos import RegistryError
from trivium.frontdoors.verl.objects.algorithms.loss_modes import POLICY_LOSSES
from trivium.frontdoors.verl.objects.batches.protocol import RowsError

GOLDEN = Path(__file__).parents[2] / "golden" / "data"


def cases(file: str, *functions: str) -> list[Any]:
    found = [case for case in json.loads((GOLDEN / f"{file}.json").read_text()) if case["function"] in functions]
    assert found
    return [pytest.param(case, id=case["name"]) for case in found]


def tensors(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    types = {"int64": torch.int64, "float64": torch.float64}
    kinds = case.get("dtypes", {})
    return {
        name: torch.tensor(value, dtype=types.get(kinds.get(name, ""), torch.float32))
        for name, value in case["inputs"].items()
    }


def same(found: Any, expected: Any, case: dict[str, Any]) -> None:
    expected = torch.tensor(expected, dtype=torch.float64)
    found = torch.as_tensor(found).detach().double()
    torch.testing.assert_close(found, expected, rtol=case.get("rtol", 1e-6), atol=case.get("atol", 1e-6))


ESTIMATORS = [name for name in core_algos.ADV_ESTIMATOR_REGISTRY if name != "grpo_vectorized"]


@pytest.mark.parametrize("case", cases("advantages", *ESTIMATORS))
def test_estimators_return_the_golden_values(case: dict[str, Any]) -> None:
    inputs, kwargs = tensors(case), dict(case["kwargs"])
    mask = inputs["response_mask"]
    if "index" in inputs:
        inputs["index"] = inputs["index"].numpy()  # verl's groups are an array
    if case["function"] in ("reinforce_plus_plus", "grpo_passk"):
        kwargs = {"config": SimpleNamespace(**kwargs)}
    if case["function"] == "gdpo":
        columns = dict(enumerate(inputs.pop("component_rewards").T.numpy()))
        section = {"gdpo_reward_keys": [*columns], "gdpo_reward_weights": kwargs.pop("weights", None)}
        kwargs |= {"token_level_rewards": torch.zeros_like(mask), "non_tensor_batch": columns, "config": section}
    found = core_algos.get_adv_estimator_fn(case["function"])(**inputs, **kwargs)
    for name, values in zip(("advantages", "returns"), found, strict=True):
        assert not (values * (1 - mask)).any()
        same(values * mask, (torch.tensor(case["expect"][name], dtype=torch.float64) * mask).tolist(), case)


def test_groups_may_have_any_names() -> None:
    rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 3.0]]), torch.ones(3, 2)
    by_name, by_number = (
        core_algos.compute_rloo_outcome_advantage(rewards, mask, index)
        for index in (np.array(["x", "y", "x"], dtype=object), torch.tensor([5, 2, 5]))
    )
    torch.testing.assert_close(by_name, by_number)
    assert by_name[0][:, 0].tolist() == [-2.0, 0.0, 2.0]


def actor(kwargs: dict[str, Any]) -> SimpleNamespace:
    """The actor's section of verl's config, as a case sets it."""
    own = {name: kwargs[name] for name in kwargs if "cov" in name or name in ("ppo_kl_coef", "dro_beta")}
    rest = {name: kwargs[name] for name in kwargs if name not in own}
    return SimpleNamespace(**{"global_batch_info": {}, **rest, "policy_loss": own})


@pytest.mark.parametrize("case", cases("policy_loss", *POLICY_LOSSES))
def test_policy_losses_return_the_golden_values_and_gradients(case: dict[str, Any]) -> None:
    inputs, kwargs = tensors(case), dict(case["kwargs"])
    log_prob = inputs["log_prob"].requires_grad_()
    loss, metrics = core_algos.get_policy_loss_fn(case["function"])(
        **inputs, loss_agg_mode=kwargs.pop("loss_agg_mode"), config=actor(kwargs)
    )
    loss.backward()
    same(loss, case["expect"]["loss"], case)
    same(log_prob.grad, case["expect"]["grad_log_prob"], case)
    assert metrics.keys() >= case["expect"]["metrics"].keys() or case["function"] in ("gpg", "clip_cov", "kl_cov")
    for name, value in metrics.items():
        same(value, case["expect"]["metrics"][name], case)


@pytest.mark.parametrize("case", cases("rollout_correction", "bypass_mode"))
def test_bypass_mode_returns_the_golden_values(case: dict[str, Any]) -> None:
    inputs, kwargs = tensors(case), dict(case["kwargs"])
    log_prob, mode = inputs["log_prob"].requires_grad_(), kwargs.pop("loss_agg_mode")
    config = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "policy_loss": {"rollout_correction": kwargs}}
    loss, metrics = core_algos.compute_policy_loss_bypass_mode(**inputs, loss_agg_mode=mode, config=config)
    loss.backward()
    same(loss, case["expect"]["loss"], case)
    same(log_prob.grad, case["expect"]["grad_log_prob"], case)
    for name, value in case["expect"]["metrics"].items():
        same(metrics[name], value, case)


def test_bypass_mode_needs_its_section() -> None:
    ones = torch.ones(1, 2)
    with refused(ConfigError, "policy_loss.rollout_correction"):
        core_algos.compute_policy_loss_bypass_mode(ones, ones, ones, ones, config={})


@pytest.mark.parametrize("case", cases("rollout_correction", "full", "is_weights", "rejection", "offpolicy_metrics"))
def test_rollout_correction_returns_the_golden_values(case: dict[str, Any]) -> None:
    weights, kept, metrics = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
        **tensors(case), **case["kwargs"]
    )
    expected = case["expect"]
    if expected.get("weights") is not None:
        assert weights is not None
        same(weights.batch["rollout_is_weights"], expected["weights"], case)
    if "response_mask" in expected:
        same(kept, expected["response_mask"], case)
    for name, value in expected["metrics"].items():
        same(metrics[f"rollout_corr/{name.removeprefix('rollout_corr/')}"], value, case)


def test_rejection_by_the_names_of_earlier_versions() -> None:
    old, rollout, mask = torch.tensor([[0.0, 1.0], [0.0, 0.1]]), torch.zeros(2, 2), torch.ones(2, 2)
    helper = rollout_corr_helper.compute_rollout_correction_and_rejection_mask
    token = helper(old, rollout, mask, rollout_rs="token", rollout_rs_threshold=2.0)[1]
    assert token.tolist() == [[1.0, 0.0], [1.0, 1.0]]
    sequence = helper(old, rollout, mask, rollout_rs="sequence", rollout_rs_threshold=2.0)[1]
    assert sequence.tolist() == [[0.0, 0.0], [1.0, 1.0]]
    lower = helper(old, rollout, mask, rollout_rs="token", rollout_rs_threshold=3, rollout_rs_threshold_lower=1.05)[1]
    assert lower.tolist() == [[0.0, 1.0], [0.0, 1.0]]
    _, kept, metrics = helper(-old, rollout, mask, rollout_token_veto_threshold=0.5)
    assert kept.tolist() == [[0.0, 0.0], [1.0, 1.0]], "the trainer finds a token less than half as likely"
    assert metrics["rollout_corr/rollout_is_veto_fraction"] == 0.5
    assert helper(old, rollout, mask, rollout_token_veto_threshold=0.5)[1].all(), "a token that is more likely is kept"
    with refused(RowsError, "rollout_token_veto_threshold", 2):
        helper(old, rollout, mask, rollout_token_veto_threshold=2)
    with refused(RowsError, "response_mask"):
        helper(old, rollout, torch.zeros(2, 2))


# --------------------------------------------------------------------------- registries


def test_registries_hold_what_ships_and_what_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_algos, "ADV_ESTIMATOR_REGISTRY", dict(core_algos.ADV_ESTIMATOR_REGISTRY))

    @core_algos.register_adv_est("my_own")
    def mine() -> None: ...

    assert core_algos.ADV_ESTIMATOR_REGISTRY["my_own"] is core_algos.get_adv_estimator_fn("my_own") is mine
    assert core_algos.get_adv_estimator_fn(AdvantageEstimator.GAE) is core_algos.compute_gae_advantage_return
    for raises in (lambda: core_algos.get_adv_estimator_fn("GAE"), lambda: core_algos.register_adv_est("grpo")(mine)):
        with pytest.raises(ValueError, match=r"grpo|GAE"):
            raises()
    with refused(RegistryError, "nothing", "@register_policy_loss"):
        core_algos.get_policy_loss_fn("nothing")


def test_gdpo_reads_the_columns_of_a_batch() -> None:
    columns, index = {"answer": np.array([1.0, 0.0])}, np.array(["a", "a"])

    def advantages(**config: Any) -> torch.Tensor:
        rewards, mask = torch.zeros(2, 1), torch.ones(2, 1)
        return core_algos.compute_gdpo_outcome_advantage(rewards, mask, index, config=config, non_tensor_batch=columns)[
            0
        ]

    torch.testing.assert_close(advantages(gdpo_reward_keys=["answer"]), torch.tensor([[0.5**0.5], [-(0.5**0.5)]]))
    with refused(DataError, "format"):
        advantages(gdpo_reward_keys=["format"])
    with refused(ConfigError, "gdpo_reward_weights", [1.0, 2.0], "gdpo_reward_keys", 1):
        advantages(gdpo_reward_keys=["answer"], gdpo_reward_weights=[1.0, 2.0])


def test_pf_ppo_draws_the_rows_of_a_batch() -> None:
    scores = torch.tensor([[0.0, 0.5], [0.0, 0.0], [0.0, -1.0]]).repeat(500, 1)
    data = DataProto.from_dict({"token_level_scores": scores}, {"row": np.arange(1500) % 3})
    torch.manual_seed(0)
    drawn = core_algos.compute_pf_ppo_reweight_data(data, "pow", 2.0).non_tensor_batch["row"]
    np.testing.assert_allclose(np.bincount(drawn, minlength=3), [300, 0, 1200], atol=80)
    extremes = core_algos.compute_pf_ppo_reweight_data(data, "max_min").non_tensor_batch["row"]
    np.testing.assert_allclose(np.bincount(extremes, minlength=3), [750, 0, 750], atol=100)
    with refused(core_algos.RegistryError, "'best'"):
        core_algos.compute_pf_ppo_reweight_data(data, "best")
