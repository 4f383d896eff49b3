"""verl's config classes: the keys of the table as fields, with its defaults and its checks."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import pytest
from failing import refused

from trivium.frontdoors.verl import (
    ActorConfig,
    AlgoConfig,
    CriticConfig,
    FSDPActorConfig,
    KLControlConfig,
    PFPPOConfig,
    bootstrap_metric,
    calc_maj_val,
    omega_conf_to_dataclass,
)
from trivium.frontdoors.verl.config.config_classes import InvalidConfig
from trivium.frontdoors.verl.config.config_table import TABLE

TARGET = "verl.trainer.config."


def test_a_mapping_becomes_objects_with_the_defaults_of_the_table() -> None:
    section = {
        "_target_": f"{TARGET}AlgoConfig",
        "gamma": 0.9,
        "kl_ctrl": {"_target_": f"{TARGET}KLControlConfig", "kl_coef": 0.002},
        "pf_ppo": {"reweight_method": "max_min"},
        "filter_groups": {"_target_": "verl.of.another.Version", "enable": True},
    }
    config = omega_conf_to_dataclass(section)
    assert (type(config), type(config.kl_ctrl), type(config.pf_ppo)) == (AlgoConfig, KLControlConfig, PFPPOConfig)
    assert (config["gamma"], config.lam, config.get("lam"), config.get("mine", 7)) == (0.9, 1.0, 1.0, 7)
    assert config.kl_ctrl.kl_coef == 0.002
    assert config.filter_groups.enable
    assert config.kl_ctrl.horizon == TABLE.default_of("algorithm.kl_ctrl.horizon")
    assert config.pf_ppo.weight_pow == TABLE.default_of("algorithm.pf_ppo.weight_pow")
    assert {*config} >= {"gamma", "kl_ctrl", "gdpo_reward_keys"}
    assert pickle.loads(pickle.dumps(config)) == config
    assert omega_conf_to_dataclass({}, AlgoConfig).kl_ctrl == KLControlConfig()
    assert omega_conf_to_dataclass(config) is config


@pytest.mark.parametrize(
    ("one", "another"),
    [
        (KLControlConfig(kl_coef=0.1), KLControlConfig(kl_coef=0.9)),
        (ActorConfig(clip_ratio=0.2), ActorConfig(clip_ratio=0.3)),
        (FSDPActorConfig(optim={"lr": 1e-6}), FSDPActorConfig(optim={"lr": 1e-5})),
        (ActorConfig(), FSDPActorConfig()),
    ],
)
def test_configs_are_equal_if_class_and_fields_are(one: Any, another: Any) -> None:
    assert one != another
    assert one == type(one)(**one)


def test_a_field_is_set_once_except_sizes_of_batches() -> None:
    actor = FSDPActorConfig(ppo_mini_batch_size=8)
    actor.ppo_mini_batch_size = actor.ppo_micro_batch_size = 4
    assert (actor.ppo_mini_batch_size, isinstance(actor, ActorConfig)) == (4, True)
    with pytest.raises(FrozenInstanceError):
        actor.clip_ratio = 0.5


@dataclass
class Own:
    """A config class of a user."""

    rate: float = 0.1


def test_a_class_of_the_user_is_built_too() -> None:
    assert omega_conf_to_dataclass({"rate": 0.5}, Own) == Own(0.5)
    assert omega_conf_to_dataclass({"_target_": f"{__name__}.Own", "rate": 0.5}).rate == 0.5


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: AlgoConfig(gamma="much"), "algorithm.gamma"),
        (lambda: ActorConfig(loss_agg_mode="sample-mean"), "actor_rollout_ref.actor.loss_agg_mode"),
        (lambda: ActorConfig(strategy="megatron"), "actor_rollout_ref.actor.strategy"),
        (lambda: CriticConfig(ppo_micro_batch_size=4, ppo_micro_batch_size_per_gpu=2), "critic.ppo_micro_batch_size"),
        (lambda: ActorConfig().validate(8, 128), "actor_rollout_ref.actor.ppo_mini_batch_size"),
        (
            lambda: ActorConfig(ppo_mini_batch_size=8, ppo_micro_batch_size=4).validate(8, 128),
            "actor_rollout_ref.actor.ppo_micro_batch_size",
        ),
        (
            lambda: ActorConfig(ulysses_sequence_parallel_size=2, use_dynamic_bsz=True).validate(1, 8, {"path": "m"}),
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
        ),
        (lambda: omega_conf_to_dataclass({"gama": 1}, AlgoConfig), "AlgoConfig.gama"),
        (lambda: omega_conf_to_dataclass({"_target_": f"{TARGET}McoreActorConfig"}), f"{TARGET}McoreActorConfig"),
        (lambda: omega_conf_to_dataclass({"gamma": 1}), "dataclass_type"),
        (lambda: omega_conf_to_dataclass({"gamma": 1}, dict), "dict"),
    ],
)
def test_values_that_do_not_fit_are_named(make: Callable[[], Any], named: str) -> None:
    with refused(InvalidConfig, named):
        make()


def test_bootstrapped_and_voted_metrics() -> None:
    pairs = bootstrap_metric([0.0, 1.0], 2, [lambda draw: sum(draw) / 2, max])
    for pair, expected in zip(pairs, [(0.5, 0.125**0.5), (0.75, 0.1875**0.5)], strict=True):
        assert pair == pytest.approx(expected, abs=0.05)
    votes = [{"pred": "a", "acc": 1}, {"pred": "b", "acc": 0}, {"pred": "b", "acc": 5}]
    assert calc_maj_val(votes, "pred", "acc") == 0
