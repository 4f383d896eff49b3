"""What the config tables of all front doors share: values, references, overrides, and what is wrong with them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.failing import refused
from trivium.config import merged
from trivium.foundation.errors import ConfigError, MissingPackage
from trivium.frontdoors.overrides import overridden, value_of
from trivium.frontdoors.plain_values import escaped, plain, resolved, unescaped
from trivium.frontdoors.tables import Ignored, KeyTable, Mapped, Restricted, announce, is_off

TABLE = KeyTable(
    {
        "train.batch": Mapped("schedule.groups_per_step", 4),
        "train.lr": Mapped("train.optimizer.lr", 1e-6),
        "train.shuffle": Mapped("schedule.shuffle", True),
        "train.name": Mapped("run.name", "mine"),
        "train.seed": Mapped("run.seed", type=int),
        "train.backend": Restricted((None, "fsdp"), "use fsdp"),
        "train.tools": Restricted((None,), "leave it out"),
        "train.profiler": Ignored("phases are timed in every step"),
        "model.path": Mapped("model.path"),
        "model.optim.lr": Mapped("train.critic_optimizer.lr", 1e-5),
    },
    unsupported={"megatron": "Megatron"},
    marks=frozenset({"_target_"}),
)


def problems_of(config: dict[str, Any]) -> dict[str, str]:
    return {problem.where: str(problem) for problem in TABLE.read(config).problems}


def test_values_and_defaults(caplog: pytest.LogCaptureFixture) -> None:
    settings = TABLE.read({"train": {"batch": 8, "lr": "1e-3", "name": 3, "profiler": {"a": 1}}})
    assert settings.problems == ()
    assert (settings["train.batch"], settings["train.lr"], settings["train.name"]) == (8, 1e-3, "3")
    assert settings["train.shuffle"] is True
    assert list(settings.notes()) == ["train.profiler: no effect: phases are timed in every step"]
    with caplog.at_level("WARNING", "trivium"):
        for _ in range(2):
            announce(settings.notes())
    assert caplog.text.count("train.profiler: no effect: phases are timed in every step") == 1


@pytest.mark.parametrize(
    "value", [None, False, 0, "", [], {}, {"enable": False, "paths": ["a"]}, {"enabled": None, "n": 4}, {"a": {"b": 0}}]
)
def test_what_is_off_passes(value: object) -> None:
    assert is_off(value)
    assert problems_of({"train": {"tools": value}}) == {}


def test_what_would_change_something_is_refused() -> None:
    assert not is_off({"enable": True, "n": 0})
    assert "leave it out" in problems_of({"train": {"tools": {"enable": True}}})["train.tools"]
    assert "Megatron is not supported" in problems_of({"train": {"backend": "megatron"}})["train.backend"]


@pytest.mark.parametrize(
    ("config", "where", "message"),
    [
        ({"train": {"bacth": 1}}, "train.bacth", "write 'train.batch'"),
        ({"model": {"lr": 1}}, "model.lr", "write 'model.optim.lr'"),
        ({"trian": {"batch": 1}}, "trian.batch", "write 'train.batch'"),
        ({"epochs": 1}, "epochs", "leave it out"),
        ({"train": {"batch": "many"}}, "train.batch", "a whole number"),
        ({"train": {"batch": 1.5}}, "train.batch", "a whole number"),
        ({"train": {"seed": "x"}}, "train.seed", "a whole number"),
        ({"train": {"shuffle": "yes"}}, "train.shuffle", "true or false"),
        ({"train": {"name": ["a"]}}, "train.name", "text"),
    ],
)
def test_what_is_wrong_is_named(config: dict[str, Any], where: str, message: str) -> None:
    assert message in problems_of(config)[where]


def test_a_suggestion_never_misleads() -> None:
    problem = problems_of({"model": {"tiled_mlp": {"enabled": True}}})["model.tiled_mlp.enabled"]
    assert problem.endswith("leave it out")


def test_marks_have_no_effect_anywhere() -> None:
    assert problems_of({"_target_": "a.B", "train": {"_target_": "c.D"}}) == {}


REFERENCES = {
    "a": {"x": 2, "same": "${.x}", "up": "${..b.y}", "whole": "${b}", "missing": "???"},
    "b": {"y": "${a.x}", "text": "runs/${a.x}/${.y}"},
    "c": {
        "chosen": "${oc.select:a.x,7}",
        "fallback": "${oc.select:a.none,7}",
        "unset": "${oc.select:a.missing,null}",
        "near": "${oc.select:.chosen,1}",
        "quoted": '${oc.select:a.none,"~/models/x"}',
        "environment": "${oc.env:TRIVIUM_NOT_THERE,${oc.select:a.none,${a.x}}}",
        "home": "${oc.env:TRIVIUM_TEST}",
        "broken": "${a.none}",
    },
}


def test_references_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIVIUM_TEST", "here")
    config = resolved(REFERENCES)
    assert config["a"] == {"x": 2, "same": 2, "up": 2, "whole": {"y": 2, "text": "runs/2/2"}, "missing": "???"}
    expected = {"chosen": 2, "fallback": 7, "unset": None, "near": 2, "quoted": "~/models/x", "environment": "2"}
    assert config["c"] == expected | {"home": "here", "broken": "${a.none}"}


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (r"a\${x}", "a${x}"),
        (r"costs \${", "costs ${"),
        (r"\${a.b}/${c}", "${a.b}/5"),
        (r"x\\\${y}", r"x\${y}"),
        (r"${d}", "${e}"),
        (r"x\\${c}", r"x\5"),
        (r"no\reference", r"no\reference"),
    ],
)
def test_text_without_a_reference_may_be_read_again(written: str, text: str) -> None:
    config = {"name": written, "list": [{"name": written}], "c": 5, "d": r"\${e}"}
    once = resolved(config)
    assert once == resolved(once) == plain(OmegaConf.create(config)) == resolved(plain(OmegaConf.create(once)))
    assert unescaped(once)["name"] == unescaped(once)["list"][0]["name"] == OmegaConf.create(config).name == text
    table = KeyTable({"name": Mapped("run.name"), "list": Ignored("-"), "c": Ignored("-"), "d": Ignored("-")})
    assert [table.read(each)["name"] for each in (config, once, OmegaConf.create(once))] == [text] * 3
    assert resolved(escaped({"name": text})) == escaped({"name": text})


def test_text_that_begins_no_reference_is_named() -> None:
    with refused(ConfigError, "a.b", "${"):
        resolved({"a": {"b": "costs ${"}})


@pytest.mark.parametrize("call", [lambda: overridden({}, ["a=1"]), lambda: resolved({"a": "${b}", "b": 1})])
def test_without_omegaconf_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
    monkeypatch.setitem(sys.modules, "omegaconf", None)
    assert overridden({"a": 1}, []) == resolved({"a": 1}) == {"a": 1}
    with refused(MissingPackage, "omegaconf", "trivium[omegaconf]"):
        call()


def test_a_circle_of_references_ends() -> None:
    assert "${" in resolved({"a": "${b}", "b": "${a}"})["a"]


def test_a_reference_that_leads_nowhere_is_an_error_where_it_is_used() -> None:
    problems = problems_of({"train": {"batch": "${nowhere.at.all}", "profiler": "${nowhere.at.all}"}})
    assert list(problems) == ["train.batch"]
    assert "leads to no value" in problems["train.batch"]
    assert problems_of({"model": {"path": "???"}, "train": {"backend": "???"}}) == {}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("", ""),
        ("run-$(date +%Y)", "run-$(date +%Y)"),
        ("{a: ['${a.b}', null]}", {"a": ["${a.b}", None]}),
    ],
)
def test_values_of_overrides(text: str, value: object) -> None:
    assert value_of(text) == value


def test_overrides_are_laid_over_a_config() -> None:
    config = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    changed = overridden(config, ["a.b=5", "+a.c.f=6", "++g.h=7", "~e", "+a.c={x: 1}"])
    assert changed == {"a": {"b": 5, "c": {"d": 2, "f": 6, "x": 1}}, "g": {"h": 7}}
    assert config == {"a": {"b": 1, "c": {"d": 2}}, "e": 3}


def test_overrides_that_cannot_be_read_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        overridden({}, ["a.b", "c=[1", "d='x", "e=1", "f.g=[${a.b},2]", "h=${"])
    assert [problem.where for problem in error.value.problems] == ["a.b", "c", "d", "f.g", "h"]


@pytest.mark.parametrize("key", ["a.path", "a.b.path", "a[3]", "a[0].c.d[0]", "~a.path.x", "["])
def test_overrides_of_a_list_name_its_elements(key: str) -> None:
    assert overridden({"a": [{"b": 1}, 5]}, ["a.0.b=3", "a[1]=4"]) == {"a": [{"b": 3}, 4]}
    with refused(ConfigError, key.lstrip("~"), "a.0.b"):
        overridden({"a": [{"b": 1, "c": [1]}]}, [f"{key}=1" if key[0] != "~" else key])


@pytest.mark.parametrize("text", ["{k:v}", "{a: {k:v}}", "[{k:v, a: 1}]"])
def test_a_colon_without_a_space_is_no_key(text: str) -> None:
    assert value_of("{k: v, 'a:b': 1}") == {"k": "v", "a:b": 1}
    with refused(ConfigError, "x", "'k:v'", "space"):
        overridden({}, [f"x={text}"])


MAPPED = KeyTable(
    {
        "opt.style": Mapped("train.optimizer.schedule"),
        "opt.schedule": Mapped("train.optimizer.schedule", "constant"),
        "clip": Mapped(("loss.clip_low", "loss.clip_high"), 0.2, when={"loss": ("ppo", "gspo")}),
        "clip_high": Mapped("loss.clip_high", type=float, when={"loss": ("ppo", "gspo")}),
        "offload": Mapped("train.cpu_offload", False, convert={True: True}),
        "rank": Mapped("train.lora.rank", 0, convert=lambda rank: rank or None),
        "alpha": Mapped("train.lora.alpha", 16, when={"rank": True}, note="half the rank in papers"),
        "frozen": Mapped("train.frozen_dtype", "fp32", convert={"bf16": "bfloat16"}, when={"rank": False}),
        "steps": Mapped("the number schedule.steps", 3),
    }
)


@pytest.mark.parametrize(
    ("config", "loss", "expected"),
    [
        ({}, "gmpo", {"train": {"optimizer": {"schedule": "constant"}}}),
        ({"opt": {"style": "cosine"}}, "gmpo", {"train": {"optimizer": {"schedule": "cosine"}}}),
        ({"opt": {"style": "cosine", "schedule": "linear"}}, "", {"train": {"optimizer": {"schedule": "linear"}}}),
        ({"opt": {"style": "cosine", "schedule": "constant"}}, "", {"train": {"optimizer": {"schedule": "cosine"}}}),
        ({"clip_high": 0.3}, "ppo", {"loss": {"clip_low": 0.2, "clip_high": 0.3}}),
        ({"clip": 0.1}, "gspo", {"loss": {"clip_low": 0.1, "clip_high": 0.1}}),
        ({"offload": True}, "", {"train": {"cpu_offload": True}}),
        ({"rank": 8, "frozen": "bf16"}, "", {"train": {"lora": {"rank": 8, "alpha": 16}}}),
        ({"frozen": "bf16", "alpha": 4}, "", {"train": {"frozen_dtype": "bfloat16"}}),
    ],
)
def test_rows_set_the_fields_of_their_paths(config: dict[str, Any], loss: str, expected: dict[str, Any]) -> None:
    defaults = {"train": {"optimizer": {"schedule": "constant"}}}
    assert MAPPED.read(config).mapped(loss=loss) == merged(defaults, expected)


def test_the_first_value_that_is_not_a_default() -> None:
    keys = ("rank", "alpha", "opt.style")
    assert MAPPED.read({"rank": 0, "alpha": 4}).first(*keys) == 4
    assert MAPPED.read({"alpha": 16, "opt": {"style": "cosine"}}).first(*keys) == "cosine"
    assert MAPPED.read({"alpha": 16}).first(*keys) == 16
    assert MAPPED.read({}).first("opt.style", "alpha") == 16


def test_rows_describe_themselves() -> None:
    rows = dict(MAPPED.rows())
    assert rows["clip"] == "loss.clip_low and loss.clip_high, with loss ppo or gspo (default 0.2)"
    assert rows["alpha"] == "train.lora.alpha, with rank; half the rank in papers (default 16)"
    assert rows["frozen"] == "train.frozen_dtype: 'bfloat16' for 'bf16', without rank (default 'fp32')"
    assert rows["steps"] == "the number schedule.steps (default 3)"
