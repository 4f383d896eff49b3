"""verl's core_algos: the golden values through verl's own names and arguments."""

from __future__ import annotations

import json
from functools import partial
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from failing import refused

from trivium.foundation.errors import ConfigError
from trivium.foundation.registry import resolve
from trivium.frontdoors.verl import AdvantageEstimator, core_algos
from trivium.frontdoors.verl.config.correction_bounds import rejection
from trivium.frontdoors.verl.objects.core_algos import RegistryError
from trivium.frontdoors.verl.registered import loss_address

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


@pytest.mark.parametrize("case", cases("advantages", *core_algos.ESTIMATORS))
def test_estimators_return_the_golden_values(case: dict[str, Any]) -> None:
    inputs, kwargs = tensors(case), dict(case["kwargs"])
    mask = inputs["response_mask"]
    if "index" in inputs:
        inputs["index"] = inputs["index"].numpy()  # verl's groups are an array
    if case["function"] in ("reinforce_plus_plus", "grpo_passk"):
        kwargs = {"config": SimpleNamespace(**kwargs)}
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


@pytest.mark.parametrize("case", cases("policy_loss", *core_algos.POLICY_LOSSES))
def test_policy_losses_return_the_golden_values_and_gradients(case: dict[str, Any]) -> None:
    inputs, kwargs = tensors(case), dict(case["kwargs"])
    log_prob = inputs["log_prob"].requires_grad_()
    loss, _ = core_algos.get_policy_loss_fn(case["function"])(
        **inputs, loss_agg_mode=kwargs.pop("loss_agg_mode"), config=actor(kwargs)
    )
    loss.backward()
    same(loss, case["expect"]["loss"], case)
    same(log_prob.grad, case["expect"]["grad_log_prob"], case)


def test_metrics_of_a_loss_are_means_over_tokens() -> None:
    old, new, ones = torch.zeros(1, 4), torch.tensor([[0.0, 1.0, 1.0, 5.0]]), torch.ones(1, 4)
    mask = torch.tensor([[1, 1, 1, 0]])
    _, metrics = core_algos.compute_policy_loss_vanilla(old, new, ones, mask, config={"clip_ratio": 0.2})
    assert metrics["train/clip_fraction"] == pytest.approx(2 / 3)


def test_an_argument_that_is_missing_is_named() -> None:
    with pytest.raises(TypeError, match="index"):
        core_algos.compute_grpo_outcome_advantage(torch.zeros(1, 1), torch.ones(1, 1))
    with pytest.raises(AttributeError, match="compute_no_advantage"):
        core_algos.compute_no_advantage  # noqa: B018


REWARDS, MASK, INDEX = torch.tensor([[0.0, 1.0], [0.0, 0.5], [2.0, 0.0], [0.0, 0.0]]), torch.ones(4, 2), [0, 0, 1, 1]
GROUPS, NAMES = (REWARDS, MASK, INDEX), "token_level_rewards response_mask index"
PARAMETERS = {
    "gae": "token_level_rewards values response_mask gamma lam",
    "grpo": f"{NAMES} epsilon norm_adv_by_std_in_grpo config",
    "grpo_vectorized": f"{NAMES} epsilon norm_adv_by_std_in_grpo config",
    "grpo_passk": f"{NAMES} epsilon norm_adv_by_std_in_grpo config kwargs",
    "reinforce_plus_plus": "token_level_rewards response_mask config kwargs",
    "reinforce_plus_plus_baseline": f"{NAMES} epsilon config kwargs",
    "remax": "token_level_rewards reward_baselines response_mask config kwargs",
    "rloo": f"{NAMES} epsilon config kwargs",
    "rloo_vectorized": f"{NAMES} epsilon config kwargs",
    "opo": f"{NAMES} epsilon config kwargs",
    "gpg": f"{NAMES} epsilon f_norm alpha config kwargs",
    "optimal_token_baseline": f"{NAMES} old_log_probs sum_pi_squared rollout_is_weights handle_zero_tail "
    "epsilon config kwargs",
    "tir_optimal_token_baseline": f"{NAMES} old_log_probs sum_pi_squared rollout_is_weights handle_zero_tail "
    "epsilon config kwargs",
}


@pytest.mark.parametrize("name", core_algos.ESTIMATORS)
def test_estimators_have_verls_parameters_in_verls_order(name: str) -> None:
    assert list(signature(core_algos.get_adv_estimator_fn(name)).parameters) == PARAMETERS[name].split()


def test_positional_arguments_are_verls() -> None:
    for name, more in (("gpg", (1e-6, 1.0, 1.0, None)), ("rloo", (1e-6, None)), ("opo", (1e-6, None))):
        function = core_algos.get_adv_estimator_fn(name)
        torch.testing.assert_close(function(*GROUPS, *more), function(*GROUPS))
    gpg = core_algos.compute_gpg_outcome_advantage
    torch.testing.assert_close(2 * gpg(*GROUPS, 1e-6, 2.0)[0], gpg(*GROUPS)[0])
    returns = core_algos.compute_reinforce_plus_plus_outcome_advantage(REWARDS, MASK, {"gamma": 0.5})[1]
    assert returns[:, 0].tolist() == [0.5, 0.25, 2.0, 0.0]


def test_only_the_estimators_that_read_the_config_in_verl_read_it() -> None:
    plain = {"norm_adv_by_std_in_grpo": False}
    for function, reads in (
        (core_algos.compute_grpo_outcome_advantage, False),
        (core_algos.compute_grpo_passk_outcome_advantage, True),
    ):
        by_config, by_default = function(*GROUPS, config=plain)[0], function(*GROUPS)[0]
        assert torch.equal(by_config, by_default) is not reads
    gamma = core_algos.compute_reinforce_plus_plus_outcome_advantage(REWARDS, MASK, gamma=0.5)[1]
    assert gamma[:, 0].tolist() == [1.0, 0.5, 2.0, 0.0]


def test_rejection_by_the_names_of_earlier_versions() -> None:
    assert rejection("token,sequence", 2.0) == {"token_k1": 2.0, "seq_sum_k1": 2.0}
    assert rejection("geometric,token_k3", "0.5_2.0,3") == {"seq_mean_k1": (0.5, 2.0), "token_k3": 3.0}
    with refused(ConfigError, "rollout_rs_threshold", 2):
        rejection("token,sequence", "1,2,3")


# --------------------------------------------------------------------------- registries


def test_registries_hold_what_ships_and_what_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_algos, "ADV_ESTIMATOR_REGISTRY", dict(core_algos.ADV_ESTIMATOR_REGISTRY))

    @core_algos.register_adv_est("my_own")
    def mine() -> None: ...

    assert core_algos.ADV_ESTIMATOR_REGISTRY["my_own"] is core_algos.get_adv_estimator_fn("my_own") is mine
    assert core_algos.get_adv_estimator_fn(AdvantageEstimator("gae")) is core_algos.compute_gae_advantage_return
    for raises in (lambda: core_algos.get_adv_estimator_fn("GAE"), lambda: core_algos.register_adv_est("grpo")(mine)):
        with pytest.raises(ValueError, match=r"grpo|GAE"):
            raises()
    with refused(RegistryError, "nothing", "@register_policy_loss"):
        core_algos.get_policy_loss_fn("nothing")


def test_functions_of_verl_and_objects_are_registered_under_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_algos, "POLICY_LOSS_REGISTRY", {})
    vanilla, gspo = core_algos.compute_policy_loss_vanilla, core_algos.compute_policy_loss_gspo
    for _ in range(2):
        assert core_algos.register_policy_loss("mine")(vanilla) is vanilla
    assert resolve("policy_losses", loss_address("mine") or "") is vanilla
    with refused(RegistryError, "mine", "compute_policy_loss_vanilla"):
        core_algos.register_policy_loss("mine")(gspo)
    core_algos.register_policy_loss("low")(partial(vanilla, loss_agg_mode="token-mean"))
    with refused(RegistryError, "low"):
        core_algos.register_policy_loss("low")(partial(vanilla, loss_agg_mode="seq-mean-token-sum"))
