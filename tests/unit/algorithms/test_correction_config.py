"""What a user may say about off-policy correction, what follows where they say nothing, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from configs import algorithm_problems, configured, with_algorithm
from failing import refused

from trivium.algorithms import Correction, GroupAlgorithm, build_algorithm, catalogue
from trivium.config import RunConfig, config_from_mapping
from trivium.foundation.errors import ConfigError
from trivium.planning.plan import plan_run

NAMED = catalogue("corrections")


def corrected(correction: Any, kind: str = "grpo", base: Path | None = None, **schedule: int) -> RunConfig:
    return with_algorithm({"kind": kind, "correction": correction}, base, **schedule)


def built(config: RunConfig) -> GroupAlgorithm:
    return build_algorithm(config.algorithm.for_run(config))


def line(config: RunConfig) -> str:
    """What `trivium check` says."""
    return plan_run(config, cores=1).text.stages[0].algorithm["correction"]


def problems(correction: Any, **said: Any) -> dict[str, str]:
    found = algorithm_problems({"kind": "grpo", "correction": correction, **said})
    return {where.removeprefix("algorithm."): text for where, text in found.items()}


# --------------------------------------------------------------------------- by default


def test_fresh_groups_are_not_corrected() -> None:
    config = with_algorithm("grpo")
    assert line(config) == "none (default: groups are fresh)"
    algorithm = built(config)
    assert (algorithm.correction, algorithm.recompute_old, algorithm.needs) == (None, False, frozenset())


def test_stale_groups_are_corrected_and_check_says_how() -> None:
    config = with_algorithm("grpo", max_staleness=2)
    assert line(config) == (
        "token importance weights truncated at 2.0, old log-probabilities recomputed "
        "(default: groups may be 2 version(s) old)"
    )
    assert f"correction: '{line(config)}'" in plan_run(config, cores=1).to_yaml()
    algorithm = built(config)
    assert algorithm.needs == {"old"}
    assert algorithm.correction is not None
    assert (algorithm.correction.weights, algorithm.correction.bounds) == ("token", (0.0, 2.0))
    (policy,) = algorithm.objectives
    assert "rollout_is_weights" in policy.needs


def test_fresh_groups_of_an_inexact_engine_are_corrected_and_check_says_why() -> None:
    config = configured(algorithm="grpo", engine={"kind": "vllm"})
    assert line(config) == (
        "token importance weights truncated at 2.0, old log-probabilities recomputed "
        "(default: engine.kind vllm computes log-probabilities differently)"
    )
    assert built(config).needs == {"old"}
    assert (
        not config.model_copy(update={"algorithm": with_algorithm({"kind": "grpo", "correction": "none"}).algorithm})
        .algorithm.for_run(config)
        .correction.active
    )


def test_a_loss_without_a_ratio_is_weighed_at_every_update_instead() -> None:
    config = with_algorithm("reinforce", max_staleness=2)
    assert line(config).startswith("token importance weights of the current policy truncated at 2.0 (default:")
    algorithm = built(config)
    assert (algorithm.correction, algorithm.needs) == (None, frozenset())
    (policy,) = algorithm.objectives
    assert policy.correction.live
    assert policy.looks_at == frozenset()


def test_the_ratio_against_the_engine_is_a_correction_by_itself() -> None:
    config = with_algorithm({"kind": "grpo", "old_log_prob": "rollout"}, max_staleness=2)
    assert line(config).startswith("none (default: groups may be 2 version(s) old, and old_log_prob: rollout")
    assert built(config).needs == frozenset()


def test_a_choice_stands_whatever_the_staleness() -> None:
    for staleness in (0, 2):
        none = corrected("none", max_staleness=staleness)
        assert line(none) == "none (algorithm.correction: none)"
        assert built(none).correction is None
        some = corrected("decoupled_geo_rs_seq_tis", max_staleness=staleness)
        assert line(some) == (
            "sequence importance weights truncated at 2.0; sequences rejected where seq_mean_k1 is outside "
            "[0.999, 1.001], old log-probabilities recomputed (algorithm.correction: decoupled_geo_rs_seq_tis)"
        )
        assert built(some).needs == {"old"}


def test_each_stage_is_settled_by_its_own_staleness() -> None:
    config = configured(engine={"kind": "scripted"}, stages=[{"schedule": {"max_staleness": 1}}, {}])
    first, second = (stage.algorithm["correction"] for stage in plan_run(config, cores=1).text.stages)
    assert first.startswith("token importance weights")
    assert second.startswith("none")


def test_algorithms_that_judge_nothing_have_no_correction() -> None:
    config = config_from_mapping(
        {
            "model": {"kind": "tiny"},
            "tasks": {"train": {"kind": "arithmetic"}},
            "algorithm": "sft",
            "engine": {"kind": "scripted"},
            "buffer": {"kind": "files"},
            "schedule": {"group_size": 1},
        }
    )
    assert plan_run(config, cores=1).text.stages[0].algorithm == {"kind": "sft"}
    with refused(ConfigError, "'correction'"):
        with_algorithm({"kind": "sft", "correction": "decoupled_token_is"})


# --------------------------------------------------------------------------- by name, by key


@pytest.mark.parametrize("kind", NAMED)
def test_a_named_correction_survives_being_saved(kind: str) -> None:
    said: Any = {"kind": kind, "weights": "token"} if kind == "custom" else kind
    config = corrected(said, "reinforce" if kind.startswith("bypass") else "grpo")
    assert NAMED[kind].source
    assert config_from_mapping(config.model_dump(mode="json")) == config
    algorithm = built(config)
    policy = algorithm.objectives[-1]
    active = kind not in ("auto", "none")
    assert (algorithm.correction is not None) == (active and not kind.startswith("bypass"))
    assert (policy.correction is not None) == (active and kind.startswith("bypass"))


def test_keys_are_laid_over_a_name_and_without_one_stand_for_themselves() -> None:
    over = corrected({"kind": "decoupled_seq_is_rs", "threshold": 3, "rejection": {"token_k2": 0.5}}).algorithm
    assert over.correction.bounds == (0.0, 3.0)
    assert over.correction.rejection == {"seq_sum_k1": (0.5, 2.0), "token_k2": 0.5}
    own = corrected({"weights": "token", "threshold": [0.5, 5], "outside": "mask"}).algorithm.correction
    assert (own.kind, own.words) == ("custom", "token importance weights, zero outside [0.5, 5.0]")
    assert corrected({"weights": "token", "outside": "mask"}).algorithm.correction.bounds == (0.5, 2.0)


def test_words_tell_every_choice_apart() -> None:
    said = {
        "token importance weights": {"weights": "token", "threshold": None},
        "token importance weights truncated at [0.5, 2.0], divided by their mean": {
            "weights": "token",
            "threshold": (0.5, 2.0),
            "normalise": True,
        },
        "token importance weights, zero for sequences whose geometric mean is outside [0.5, 2.0]": {
            "weights": "token",
            "outside": "mask_sequence",
        },
        "tokens rejected where token_k2 of the current policy is above 0.5": {
            "rejection": {"token_k2": 0.5},
            "against": "current",
        },
        "sequences rejected where seq_sum_k1 is outside [0.5, 2.0]": {"rejection": {"seq_sum_k1": 2.0}},
        "none": {},
    }
    assert [Correction(kind="custom", **keys).words for keys in said.values()] == list(said)


def test_a_correction_of_the_user_s_own_file(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from trivium.algorithms import NamedCorrection\n"
        "MINE = NamedCorrection({'weights': 'sequence', 'threshold': 5.0}, 'here')\n"
    )
    assert corrected("own.py:MINE", base=tmp_path).algorithm.correction.bounds == (0.0, 5.0)


# --------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("correction", "where", "hint"),
    [
        ({"rejection": {"seq_mean_k1": 2.0}, "threshold": 3.0}, "correction.threshold", "there are none"),
        ({"rejection": {"seq_mean_k1": 2.0}, "normalise": True}, "correction.normalise", "there are none"),
        ({"rejection": {"seq_men_k1": 2.0}}, "correction.rejection.seq_men_k1", "did you mean 'seq_mean_k1'"),
        ({"rejection": {"seq_min_k1": 2.0}}, "correction.rejection.seq_min_k1", "no such option"),
        ({"rejection": {"token_k2": [0.1, 0.5]}}, "correction.rejection.token_k2", "one upper bound"),
        ({"rejection": {"token_k3": 0}}, "correction.rejection.token_k3", "one upper bound"),
        ({"rejection": {"token_k1": 1.0}}, "correction.rejection.token_k1", "above 1"),
        ({"rejection": {"token_k1": [1.1, 2.0]}}, "correction.rejection.token_k1", "around 1"),
        ({"rejection": {"token_k1": [0, 2.0]}}, "correction.rejection.token_k1", "above 0"),
        ({"weights": "token", "threshold": 0}, "correction.threshold", "above 1"),
        ({"weights": "token", "threshold": [1.2, 2.0]}, "correction.threshold", "around 1"),
        ({"weights": "token", "threshold": None, "outside": "mask"}, "correction.outside", "no threshold"),
        ({"kind": "none", "threshold": 3.0}, "correction.threshold", "no options"),
        ({"kind": "auto", "weights": "token"}, "correction.weights", "no options"),
        ({}, "correction", "neither weights nor rejection"),
        ({"against": "current"}, "correction", "neither weights nor rejection"),
        ("bypass_token_is", "correction", "count twice"),
        ("decoupled_tokn_is", "correction", "did you mean 'decoupled_token_is'"),
        ({"kind": "decoupled_seq_is", "treshold": 2.0}, "correction.treshold", "did you mean 'threshold'"),
    ],
)
def test_bounds_that_cannot_be_meant_and_keys_without_effect_are_errors(correction: Any, where: str, hint: str) -> None:
    found = problems(correction)
    assert list(found) == [where]
    assert hint in found[where]


def test_the_engine_s_log_probs_cannot_be_corrected_by_themselves() -> None:
    assert "would be equal" in problems("decoupled_seq_is", old_log_prob="rollout")["old_log_prob"]


def test_weights_make_a_loss_without_a_ratio_legal_as_far_as_they_reach() -> None:
    weighed = {"kind": "reinforce", "correction": "decoupled_token_is"}
    assert with_algorithm(weighed, max_staleness=2)
    with refused(ConfigError, "algorithm.policy_loss", "2 updates"):
        with_algorithm({**weighed, "epochs": 2}, max_staleness=2)
    assert with_algorithm({"kind": "reinforce", "correction": "bypass_token_is", "epochs": 2}, max_staleness=2)
    for idle in ("none", "decoupled_k3_rs"):
        with refused(ConfigError, "algorithm.policy_loss", "no ratio"):
            with_algorithm({"kind": "reinforce", "correction": idle}, max_staleness=2)
