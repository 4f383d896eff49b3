"""`trivium explain`: the formulas of the functions that run, with the values of the config."""

import re
from pathlib import Path

import pytest
from failing import refused
from typer.testing import CliRunner

from trivium.algorithms.formulas import mentions_option
from trivium.cli import app
from trivium.config import RunConfig, config_from_mapping, merged
from trivium.foundation.errors import ConfigError
from trivium.foundation.registry import CATALOGUE, resolve
from trivium.runtime.build import algorithm_of, explain

BASE = {"model": {"kind": "tiny"}, "tasks": {"train": {"kind": "arithmetic", "max_operand": 9}}, "rewards": ["exact"]}
ROOT = Path(__file__).parents[3]


def config(**algorithm: object) -> RunConfig:
    return config_from_mapping(merged(BASE, {"algorithm": algorithm}))


def test_values_of_the_config_stand_in_the_formulas() -> None:
    said = config(
        kind="grpo",
        advantage={"norm_by_std": False},
        policy_loss={"clip_high": 0.28, "dual_clip": None},
        entropy={"coef": 0.01},
        kl={"coef": 0.003, "estimator": "k2"},
        aggregate="seq-mean-token-mean",
        mini_batches=4,
        epochs=2,
    )
    text = explain(said)
    assert re.search(r"^A +\(R - mean\(R over the group\)\)$", text, re.MULTILINE)
    assert "clip(r, 1 - 0.2, 1 + 0.28)); r = exp" in text
    assert "mean of l - 0.01 H + 0.003 KL" in text
    assert re.search(r"^KL +d\^2 / 2; d = log_prob - ref_log_prob$", text, re.MULTILINE)
    assert "seq-mean-token-mean: mean over sequences of the mean over tokens" in text
    assert "8 per train step: 2 pass(es) over 4 mini-batch(es)" in text
    assert "[PPO, Schulman et al. 2017" in text


def test_teachers_steered_bonuses_curricula_and_sources_are_explained() -> None:
    """A steered bonus, a teacher with a context, observations, a curriculum and the sources of a step."""
    text = explain(
        config(
            kind="sdpo",
            entropy={"target": 0.4, "step": 0.01},
            teacher={"weights": "average", "rate": 0.2, "context": ["{prompt}: {answer}"]},
            distill={"coef": 0.5},
            observation_coef=0.05,
        )
    )
    for part in ("changes by 0.01 a step; 0 while the entropy is above 0.4", "'{prompt}: {answer}'", "+ 0.05 O"):
        assert part in text
    assert "average weights, 0.2 of the current ones after each update" in text
    assert "0.5 mean of l + 0.5 mean of d" in text
    assert "curriculum" not in text
    schedule = {"curriculum": {"kind": "success_rate", "retire_above": 0.9}, "group_size": 1}
    text = explain(config_from_mapping({**BASE, "algorithm": "a_star_po", "schedule": schedule}))
    assert text.startswith("curriculum success_rate: ")
    assert "retire_above 0.9" in text
    assert "over the rewards q in the task's column reference_rewards" in text


def test_what_happens_before_the_loss_is_told() -> None:
    text = explain(
        config(
            kind="ppo",
            shaping=[{"kind": "clip", "low": -2.0, "high": 2.0}],
            filters=["zero_variance"],
            refill=3,
            kl={"coef": 0.1, "place": "reward"},
            correction="decoupled_geo_rs_token_tis",
            gates=["top_entropy"],
            clip_advantages=5.0,
            mask_truncated=True,
            resample={"power": 3.0},
            critic={"clip": 0.25},
        )
    )
    for words in (
        "clip(R, -2, 2)",
        "keep if max(R) - min(R) > 0",
        "3 time(s) at most",
        "less 0.1 KL",
        "clip(A, -5, 5)",
        "token importance weights truncated at 2.0; sequences rejected where seq_mean_k1",
        "0.2 of the mini-batch",
        "not trained on",
        "proportional to |R|^3",
        "(min(max(v, V - 0.25), V + 0.25) - G)^2",
        "old_log_prob (recomputed before the step)",
    ):
        assert words in text, words


def test_the_correction_that_staleness_brings_is_told() -> None:
    said = config_from_mapping(merged(BASE, {"schedule": {"max_staleness": 2}}))
    assert "token importance weights truncated at 2.0" in explain(said)
    assert "importance" not in explain(config_from_mapping(BASE))


@pytest.mark.parametrize("kind", [kind for kind in CATALOGUE["algorithms"] if not kind.startswith("distill")])
def test_every_preset_explains_itself(kind: str) -> None:
    said: dict = {"algorithm": {"kind": kind}, "schedule": {"groups_per_step": 2, "group_size": 2}}
    if kind == "iw_opd":  # it has no teacher of its own
        said["algorithm"]["teacher"] = {"context": "{prompt} {answer}"}
    built = config_from_mapping(merged(BASE, said)) if kind != "sft" else None
    if built is None:
        said |= {"buffer": {"kind": "files"}, "schedule": {"groups_per_step": 2, "group_size": 1}}
        built = config_from_mapping({**BASE, **said, "rewards": []})
    text = explain(built)
    assert text.startswith("algorithm")
    assert resolve("algorithms", kind).source in text
    formulas = "\n".join(line for line in text.splitlines() if not line.startswith("it reads"))  # a teacher's templates
    assert "{" not in formulas
    assert "}" not in formulas
    # No option's name is left where its value should stand.
    for objective in algorithm_of(built).objectives:
        loss = getattr(objective, "policy_loss", None)
        for name in loss.keywords if loss is not None else ():
            lines = [line for line in text.splitlines() if line.startswith("l ")]
            assert not any(mentions_option(line.partition("   (")[0], name) for line in lines), name


def test_each_stage_is_explained_on_the_command_line() -> None:
    done = CliRunner().invoke(app, ["explain", str(ROOT / "recipes/arithmetic.yaml")])
    assert done.exit_code == 0
    assert done.output.index("stage 0") < done.output.index("-log_prob") < done.output.index("stage 1")
    assert "1 + 0.3" in done.output


@pytest.mark.parametrize(
    ("algorithm", "where"),
    [
        ({"advantage": {"norm_by_std": False, "epsilon": 1e-3}}, "algorithm.advantage.epsilon"),
        ({"policy_loss": {"kind": "rec", "clip": "two_side", "ring_low": 0.5}}, "algorithm.policy_loss.ring_low"),
    ],
)
def test_an_option_that_the_others_switch_off_is_an_error(algorithm: dict, where: str) -> None:
    with refused(ConfigError, where):
        config(kind="grpo", **algorithm)
