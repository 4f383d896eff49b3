"""What a user may say about an algorithm, and what is refused because it would be ignored."""

import pickle
from pathlib import Path
from typing import Any

import pytest
from configs import algorithm_problems, with_algorithm
from failing import refused

from trivium.algorithms import GroupAlgorithm, Preset, build_algorithm, catalogue
from trivium.config import RunConfig, config_from_mapping
from trivium.foundation.errors import ConfigError

PRESETS = catalogue("algorithms")
FILES = {"buffer": {"kind": "files"}}


def built(algorithm: object) -> GroupAlgorithm:
    return build_algorithm(with_algorithm(algorithm).algorithm)


@pytest.fixture
def teacher(tmp_path: Path) -> str:
    """A directory that a check takes for a model."""
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def least(kind: str, teacher: str) -> dict[str, object]:
    """The least that a user must say about a preset."""
    return {"kind": kind, "teacher": {"path": teacher}} if kind.startswith(("distill", "iw_opd")) else {"kind": kind}


def as_it_runs(algorithm: dict[str, object]) -> RunConfig:
    """A config in which the preset can run."""
    if algorithm["kind"] == "sft":
        return with_algorithm(algorithm, sections=FILES, group_size=1)
    return with_algorithm(algorithm)


@pytest.mark.parametrize("kind", PRESETS)
def test_a_preset_is_complete_and_survives_being_saved(kind: str, teacher: str) -> None:
    config = as_it_runs(least(kind, teacher))
    assert isinstance(PRESETS[kind], Preset)
    assert PRESETS[kind].source
    assert build_algorithm(config.algorithm).name == kind
    assert config_from_mapping(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("kind", PRESETS)
def test_an_algorithm_crosses_a_process_boundary(kind: str, teacher: str) -> None:
    algorithm = build_algorithm(as_it_runs(least(kind, teacher)).algorithm)
    assert pickle.loads(pickle.dumps(algorithm)).objectives[0].needs == algorithm.objectives[0].needs


def test_no_preset_needs_a_reference_model_or_an_extra_pass_unless_asked(teacher: str) -> None:
    needs = {kind: set(build_algorithm(as_it_runs(least(kind, teacher)).algorithm).needs) for kind in PRESETS}
    assert {kind: what for kind, what in needs.items() if what} == {
        "ppo": {"values"},
        "distill": {"teacher"},
        "distill_top_k": {"teacher_top"},
        "distill_student_top_k": {"student_top"},
        "opsd": {"teacher_top"},
        "sdft": {"student_top"},
        "sdpo": {"student_top"},
        "iw_opd": {"teacher"},
        "decoupled_ppo": {"old"},
        "dpo": {"ref"},
        "ipo": {"ref"},
        "kto": {"ref"},
        "a_star_po": {"ref"},
    }


def test_options_reach_the_functions() -> None:
    algorithm = built(
        {
            "kind": "grpo",
            "advantage": {"norm_by_std": False},
            "policy_loss": {"clip_high": 0.28, "dual_clip": None},
            "aggregate": "seq-mean-token-sum-norm",
            "entropy": {"coef": 0.01},
            "kl": {"coef": 0.1, "estimator": "k3+"},
            "epochs": 2,
            "mini_batches": 4,
        }
    )
    (policy,) = algorithm.objectives
    assert policy.policy_loss.keywords == {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None}
    assert algorithm.estimator.function.keywords == {"norm_by_std": False, "std_level": "group", "epsilon": 1e-6}
    assert (policy.aggregate, policy.entropy.coef) == ("seq-mean-token-sum-norm", 0.01)
    assert (policy.kl.coef, policy.kl.function.func.__name__) == (0.1, "k3_plus")
    assert (algorithm.epochs, algorithm.mini_batches) == (2, 4)


def test_another_kind_starts_its_section_afresh() -> None:
    algorithm = built(
        {"kind": "grpo", "advantage": "gae", "policy_loss": {"kind": "reinforce"}, "critic": {"clip": 0.2}}
    )
    critic, policy = algorithm.objectives
    assert (critic.clip, policy.metadata.needs) == (0.2, {"advantages"})


def test_mistyped_keys_are_named_with_the_nearest_one_at_every_depth() -> None:
    problems = algorithm_problems(
        {"kind": "ppo", "agregate": "token-mean", "policy_loss": {"clip_hi": 1}, "kl": {"coeff": 1}}
    )
    assert "did you mean 'aggregate'" in problems["algorithm.agregate"]
    assert "did you mean 'clip_high'" in problems["algorithm.policy_loss.clip_hi"]
    assert "did you mean 'coef'" in problems["algorithm.kl.coeff"]
    assert "did you mean 'grpo'" in algorithm_problems({"kind": "grpo", "advantage": "grp"})["algorithm.advantage"]


@pytest.mark.parametrize(
    ("algorithm", "where"),
    [
        ({"kind": "grpo", "policy_loss": {"kind": "reinforce", "clip_low": 0.1}}, "algorithm.policy_loss.clip_low"),
        ({"kind": "grpo", "critic": {"clip": 0.1}}, "algorithm.critic.clip"),
        ({"kind": "grpo", "critic_warmup": 1}, "algorithm.critic_warmup"),
        ({"kind": "grpo", "kl": {"estimator": "k1"}}, "algorithm.kl.estimator"),
        ({"kind": "grpo", "kl": {"coef": 0.1, "controller": "adaptive"}}, "algorithm.kl.controller"),
        ({"kind": "grpo", "kl": {"coef": 0.1, "place": "reward", "target": 1.0}}, "algorithm.kl.target"),
        ({"kind": "grpo", "kl": {"coef": 0.1, "place": "reward", "estimator": "k3+"}}, "algorithm.kl.estimator"),
        ({"kind": "reinforce", "old_log_prob": "recompute"}, "algorithm.old_log_prob"),
        ({"kind": "grpo", "policy_loss": "sft"}, "algorithm.policy_loss"),
        ({"kind": "grpo", "policy_loss": "mix"}, "algorithm.policy_loss"),
        ({"kind": "grpo", "entropy": {"coef": 0.1, "term": "sampled"}}, "algorithm.entropy.term"),
        ({"kind": "grpo", "kl": {"coef": 0.1, "estimator": "k1"}}, "algorithm.kl.estimator"),
        ({"kind": "grpo", "gates": ["top_entropy"], "policy_loss": "gmpo"}, "algorithm.gates[0]"),
        ({"kind": "max_rl", "kl": {"coef": 0.1, "place": "reward"}}, "algorithm.kl.place"),
        ({"kind": "gigpo", "shaping": ["scale_shift"]}, "algorithm.shaping"),
        ({"kind": "a_star_po", "shaping": ["scale_shift"]}, "algorithm.shaping"),
        ({"kind": "a_star_po", "kl": {"coef": 0.1, "place": "reward"}}, "algorithm.kl.place"),
        ({"kind": "sft"}, "algorithm.kind"),
        ({"kind": "sft", "advantage": "grpo"}, "algorithm.advantage"),
        ({"kind": "grpo", "policy_loss": {"clip_low": -0.1}}, "algorithm.policy_loss.clip_low"),
        ({"kind": "grpo", "advantage": "gdpo", "kl": {"coef": 0.1, "place": "reward"}}, "algorithm.kl.place"),
        ({"kind": "grpo", "advantage": "gdpo", "shaping": ["clip"]}, "algorithm.shaping"),
        ({"kind": "ppo", "normalise_advantages": "std"}, "algorithm.normalise_advantages"),
        (
            {"kind": "grpo", "advantage": "reinforce_plus_plus", "normalise_advantages": "mean"},
            "algorithm.normalise_advantages",
        ),
        ({"kind": "grpo", "clip_advantages": 0.0}, "algorithm.clip_advantages"),
        ({"kind": "grpo", "policy_loss": "trivium.algorithms.estimators.group:grpo"}, "algorithm.policy_loss"),
        ({"kind": "grpo", "advantage": "trivium.algorithms.losses.clipped:ppo"}, "algorithm.advantage"),
    ],
)
def test_a_key_that_would_be_ignored_or_cannot_work_is_an_error(algorithm: object, where: str) -> None:
    assert list(algorithm_problems(algorithm)) == [where]


def test_group_estimators_want_groups_and_mini_batches_want_data() -> None:
    assert "compares the members" in algorithm_problems("grpo", group_size=1)["schedule.group_size"]
    assert with_algorithm("reinforce", group_size=1)
    problems = algorithm_problems({"kind": "reinforce", "mini_batches": 5}, groups_per_step=4)
    assert "4 group(s)" in problems["algorithm.mini_batches"]
    problems = algorithm_problems({"kind": "ppo", "critic": {"mini_batches": 5}}, groups_per_step=4)
    assert "4 group(s)" in problems["algorithm.critic.mini_batches"]


def refused_on_files(algorithm: object, **schedule: int) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        with_algorithm(algorithm, sections=FILES, **schedule)
    return {where: " ".join(rest) for where, *rest in caught.value.problems}


def test_replies_of_an_expert_are_for_imitation_one_per_task() -> None:
    for kind in ("grpo", "ppo", "rloo", "reinforce"):
        assert "use algorithm.kind sft" in refused_on_files(kind, group_size=2)["algorithm.kind"]
    assert list(refused_on_files("sft", group_size=2)) == ["schedule.group_size"]
    assert with_algorithm("sft", sections=FILES, group_size=1)


def test_a_loss_without_ratio_and_weights_wants_fresh_samples() -> None:
    offset = {"sync": {"offset": 1}}
    for stale in ({"max_staleness": 1}, {"sections": offset}):
        problems = algorithm_problems({"kind": "reinforce", "correction": "none"}, **stale)
        assert list(problems) == ["algorithm.policy_loss"]
        assert "no ratio" in problems["algorithm.policy_loss"]
        assert with_algorithm("reinforce", **stale)
        assert with_algorithm("rloo", **stale)
    assert with_algorithm("sft", group_size=1, sections={**FILES, **offset})
    assert with_algorithm("sft", group_size=1, sections=FILES, max_staleness=1)
    assert with_algorithm("reinforce", max_staleness=0)


def test_what_is_made_for_stale_groups_is_left_alone() -> None:
    for algorithm in ("m2po", "topr", "vespo", "sppo", "rec", "prime", "dppo", "opmd", "asymre"):
        stale = with_algorithm(algorithm, max_staleness=2)
        assert not stale.algorithm.for_run(stale).correction.active, algorithm
        assert "designed for them" in stale.algorithm.describe(stale)["correction"]
        assert not build_algorithm(stale.algorithm.for_run(stale)).recompute_old
    for algorithm in ({"kind": "grpo", "gates": ["sequence_drift"]}, {"kind": "grpo", "gates": ["top_entropy"]}):
        stale = with_algorithm(algorithm, max_staleness=2)
        assert stale.algorithm.for_run(stale).correction.active == (algorithm["gates"] == ["top_entropy"])


def test_old_log_probs_are_asked_of_whoever_reads_them() -> None:
    for reader in ({"gates": ["sequence_drift"]}, {"kl": {"coef": 0.1, "estimator": "corrected_k3"}}):
        assert built({"kind": "reinforce", "old_log_prob": "recompute", **reader}).recompute_old
    assert built({"kind": "reinforce", "advantage": "optimal_token_baseline"}).needs == {"log_prob", "sum_pi_squared"}


@pytest.mark.parametrize("several", [{"mini_batches": 2}, {"epochs": 2}])
def test_a_loss_without_a_ratio_takes_one_update_per_step(several: dict[str, int]) -> None:
    with refused(ConfigError, "algorithm.policy_loss", "'reinforce'", "2 updates"):
        with_algorithm({"kind": "reinforce", **several})
    assert with_algorithm({"kind": "rloo", **several})


OWN = """
from typing import Annotated

from pydantic import Field

from trivium.algorithms import Advantages, PerToken, advantage, policy_loss
from trivium.algorithms.presets import GRPO


@policy_loss(formula="-scale A log_prob", source="here", needs={"advantages"}, on_policy="factor: scale")
def scaled(x, *, scale: Annotated[float, Field(gt=0)] = 2.0) -> PerToken:
    return PerToken(-scale * x.advantages * x.log_prob)


@advantage(formula="R", source="here")
def raw(x) -> Advantages:
    return Advantages(x.token_level_rewards, x.token_level_rewards)


def bare(x):
    return x


MINE = GRPO.replace("here", advantage={"kind": "reinforce"}, aggregate="token-sum")
"""


def test_losses_estimators_and_presets_from_a_file_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    said = {"kind": "grpo", "policy_loss": {"kind": "own.py:scaled", "scale": 3.0}, "advantage": "own.py:raw"}
    algorithm = build_algorithm(with_algorithm(said, tmp_path).algorithm)
    assert algorithm.objectives[0].policy_loss.keywords == {"scale": 3.0}
    assert algorithm.objectives[0].on_policy == "factor: scale"
    mine = build_algorithm(with_algorithm("own.py:MINE", tmp_path).algorithm)
    assert mine.objectives[0].aggregate == "token-sum"
    for wrong, name in (({"kind": "own.py:scaled", "scal": 1}, "'scale'"), ("own.py:bare", "@policy_loss")):
        with refused(ConfigError, "algorithm.policy_loss", name):
            with_algorithm({"kind": "grpo", "policy_loss": wrong}, tmp_path)


@pytest.mark.parametrize(
    ("algorithm", "where"),
    [
        ({"kind": "distill"}, "algorithm.teacher"),
        ({"kind": "distill", "teacher": {"path": "nowhere"}}, "algorithm.teacher.path"),
        ({"kind": "distill", "teacher": {"path": "TEACHER", "top_k": 8}}, "algorithm.teacher.top_k"),
        ({"kind": "distill", "teacher": {"path": "TEACHER"}, "policy_loss": "sft"}, "algorithm.teacher"),
        ({"kind": "distill", "teacher": {"path": "TEACHER"}, "epochs": 2}, "algorithm.policy_loss"),
        ({"kind": "grpo", "teacher": {"path": "TEACHER"}}, "algorithm.teacher"),
        ({"kind": "sft", "teacher": {"path": "TEACHER"}}, "algorithm.teacher"),
        ({"kind": "grpo", "policy_loss": "distill", "teacher": {"path": "TEACHER"}}, "algorithm.policy_loss"),
    ],
)
def test_a_teacher_is_there_and_somebody_asks_it(algorithm: dict, where: str, teacher: str) -> None:
    said = dict(algorithm)
    if said.get("teacher", {}).get("path") == "TEACHER":
        said["teacher"] = {**said["teacher"], "path": teacher}
    assert list(algorithm_problems(said)) == [where]


def test_sampled_tokens_of_a_distillation_are_the_policys_own(teacher: str) -> None:
    expert = {"sections": FILES, "group_size": 1}
    with refused(ConfigError, "algorithm.policy_loss", "'distill'", "distill_top_k"):
        with_algorithm(least("distill", teacher), **expert)
    with_algorithm(least("distill_top_k", teacher), **expert)
    with refused(ConfigError, "algorithm.policy_loss", "no ratio"):
        with_algorithm(least("distill", teacher), max_staleness=1)
    with_algorithm(least("distill_top_k", teacher), max_staleness=1)
    assert with_algorithm(least("distill_top_k", teacher)).algorithm.epochs == 1


def test_sampled_tokens_of_a_distillation_beside_rewards_are_the_policys_own(teacher: str) -> None:
    def said(loss: str, **changes: Any) -> dict[str, object]:
        term = {"coef": 0.5, "loss": {"kind": loss}}
        return {"kind": "grpo", "teacher": {"path": teacher}, "distill": term, **changes}

    mixed = {"buffer": {"strategy": {"kind": "mix", "taskset": "experts"}}}
    cases = [({}, {"max_staleness": 1}), ({"epochs": 2}, {}), ({"policy_loss": "mix"}, {"sections": mixed})]
    for changes, given in cases:
        assert "algorithm.distill.loss" in algorithm_problems(said("distill", **changes), **given), changes
        if "sections" not in given:
            with_algorithm(said("distill_top_k", **changes), **given)
    with_algorithm(said("distill"), max_staleness=0)


def test_a_distillation_asks_for_no_reward_unless_it_is_evaluated(teacher: str) -> None:
    said = {
        "model": {"kind": "tiny"},
        "tasks": {"train": {"kind": "arithmetic"}},
        "engine": {"kind": "scripted"},
        "algorithm": least("distill", teacher),
    }
    assert not config_from_mapping(said).algorithm.reads_rewards
    for change in ({"algorithm": "grpo"}, {"evaluation": {"taskset": "train"}}):
        with pytest.raises(ConfigError) as caught:
            config_from_mapping(said | change)
        assert [problem[0] for problem in caught.value.problems] == ["rewards"]


def test_advantages_that_are_not_whitened_may_be_normalised() -> None:
    said = {"kind": "ppo", "advantage": {"whiten": False}, "normalise_advantages": "std", "clip_advantages": 5.0}
    estimator = built(said).estimator
    assert estimator is not None
    assert (estimator.normalise, estimator.clip) == ("std", 5.0)


def test_a_filter_of_rewards_wants_rewards(teacher: str) -> None:
    said = {"model": {"kind": "tiny"}, "tasks": {"train": {"kind": "arithmetic"}}, "engine": {"kind": "scripted"}}
    algorithm = {"kind": "grpo", "advantage": "on_policy_distill", "teacher": {"path": teacher}}
    assert config_from_mapping({**said, "algorithm": {**algorithm, "filters": ["overlong"]}})
    with refused(ConfigError, "algorithm.filters"):
        config_from_mapping({**said, "algorithm": {**algorithm, "filters": ["zero_variance"]}})


def test_a_context_that_shows_a_success_needs_a_group() -> None:
    def teacher(*context: str) -> dict[str, object]:
        return {"kind": "sdft", "teacher": {"weights": "initial", "context": context}}

    assert list(algorithm_problems(teacher("{success}"), group_size=1)) == ["algorithm.teacher.context"]
    with_algorithm(teacher("{success}"), group_size=2)
    with_algorithm(teacher("{success}", "{feedback}"), group_size=1)
