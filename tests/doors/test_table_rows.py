"""Every row of every table of the front doors: it can be read, sets the fields that it names, and refuses other values.

What a row says is compared with docs/ in tests/unit/tools/test_docs.py; here, what it says is what happens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from trivium.config import config_from_mapping, merged
from trivium.foundation.errors import Problem
from trivium.frontdoors.plain_values import plain
from trivium.frontdoors.tables import Ignored, KeyTable, Mapped, Moved, Restricted, is_off
from trivium.frontdoors.trinity.config.config_table import TABLE as TRINITY
from trivium.frontdoors.trinity.config.config_table import TRAINER_CONFIG
from trivium.frontdoors.trinity.config.keys_of_data import EXPERIENCE_BUFFER, TASKSET
from trivium.frontdoors.trinity.translation import translate
from trivium.frontdoors.trl.trainer_keys import TRAINERS, table
from trivium.frontdoors.verl.config.config_table import TABLE as VERL
from trivium.frontdoors.verl.translation import settings_of, translated
from trivium.text.tiny import TinyModel

TABLES: dict[str, KeyTable] = {
    "verl": VERL,
    "trinity": TRINITY,
    "trinity-taskset": TASKSET,
    "trinity-experience-buffer": EXPERIENCE_BUFFER,
    "trinity-trainer-config": TRAINER_CONFIG,
    **{f"trl-{name}": table(name) for name in TRAINERS},
}


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """A config with these values at dotted keys."""
    config: dict[str, Any] = {}
    for key, value in values.items():
        for name in reversed(key.split(".")):
            value = {name: value}
        config = merged(config, value)
    return config


def problems_of(table: KeyTable, key: str, value: object) -> list[Problem]:
    return list(table.read(nested({key: value})).problems)


# --------------------------------------------------------------------------- reading


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_an_alias_names_a_key(table: KeyTable) -> None:
    for key, entry in table.entries.items():
        if isinstance(entry, Moved):
            assert isinstance(table.entries[entry.to], Mapped | Restricted | Ignored), key


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_restricted_key_takes_its_values_and_no_other(table: KeyTable) -> None:
    for key, entry in table.entries.items():
        if isinstance(entry, Restricted):
            assert [value for value in entry.values if problems_of(table, key, value)] == [], key
            (problem,) = problems_of(table, key, "another value")
            assert (problem.where, problem.do) == (key, entry.instead)
            assert "another value" in problem.asked


WRONG: dict[type, Any] = {bool: "perhaps", int: 1.5, float: "many", str: ["a"], dict: [1], Path: 1}
"""Type of a key -> a value of another type."""


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_key_takes_its_default_and_no_other_type(table: KeyTable) -> None:
    for key, entry in table.entries.items():
        if isinstance(entry, Mapped) and key not in table.sections:
            assert problems_of(table, key, entry.default) == [], key
            if (kind := entry.type or type(entry.default)) in WRONG:
                (problem,) = problems_of(table, key, WRONG[kind])
                assert (problem.where, "it must be" in problem.found) == (key, True)


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_no_section_takes_a_key_that_nobody_reads(table: KeyTable) -> None:
    for section in table.sections:
        key = f"{section}.qqqqqqqqqq" if section else "qqqqqqqqqq"
        if not isinstance(table.entry_of(key), Ignored | Restricted):
            (problem,) = problems_of(table, key, 1)
            assert (problem.where, problem.found) == (key, "no key of that name is translated")


# --------------------------------------------------------------------------- what a row sets

Case = tuple[str, Any, dict[str, Any], dict[str, Any]]
"""A key, its value, the keys with which the row applies, and path -> value of the RunConfig fields that it sets."""

OF_A_MODEL = (
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.model.lora_adapter_path",
    "algorithm.enable_router_replay",
)
"""Keys whose value must fit the files of a model: what they set is compared before it is checked."""
NAMED: dict[str, tuple[Any, ...]] = {
    "model.path": ("owner/name",),
    "lora_adapter_path": ("owner/name",),
    "lr_scheduler_type": ("cosine",),
    "warmup_style": ("cosine",),
    "kl_penalty": ("k1", "k3"),
    "kl_loss_type": ("k2", "k3"),
    "loss_agg_mode": ("seq-mean-token-sum", "seq-mean-token-mean"),
    "tool_response_truncate_side": ("left", "right"),
    "listen_address": ("localhost",),
    "save_strategy": ("single_thread", "SINGLE_NODE"),
    "param_dtype": ("bf16", "fp32"),
    "dtype": ("bfloat16", "float32"),
    "train_batch_size": (4,),
    "rollout.n": (4,),
    "parallel_size": (2,),
    "expert_parallel_size": (1,),  # sets nothing; with more, the model must have experts
    "max_num_batched_tokens": (4096,),
    "top_k": (3,),
    "clip_ratio_c": (5.0,),
    "cov_lb": (0.5,),
    "cov_ub": (9.0,),
    "horizon": (50,),
}
"""The end of a key -> values that it takes; the longest end counts."""
OF_TYPE: dict[type, tuple[Any, ...]] = {
    bool: (True, False),
    int: (7,),
    float: (0.25,),
    str: ("text",),
    Path: ("/a/b",),
    tuple: ((0.8, 0.9),),
    list: ([1, 2],),
    dict: ({"block_size": 32},),
    object: (["q_proj"],),
    type(None): (0.25,),
}
"""Type of a key -> values."""


def values_of(key: str, entry: Mapped) -> list[Any]:
    """Values that differ from the default of a row."""
    ends = [end for end in NAMED if key.endswith(end)]
    values = NAMED[max(ends, key=len)] if ends else OF_TYPE[entry.type or type(entry.default)]
    values = tuple(entry.convert) if isinstance(entry.convert, Mapping) else values
    return [value for value in values if value != entry.default]


def cases_of(table: KeyTable, contexts: Mapping[tuple[str, Any], dict[str, Any]], prefix: str = "") -> Iterator[Case]:
    """Each row that has paths, with each of its conditions and each of its values."""
    for key, entry in table.entries.items():
        if not isinstance(entry, Mapped) or not entry.paths:
            continue
        choices = [
            [(name, each) for each in (wanted if isinstance(wanted, tuple) else (wanted,))]
            for name, wanted in entry.when.items()
        ]
        for conditions in itertools.product(*choices):
            beside: dict[str, Any] = {}
            for name, wanted in conditions:
                beside |= contexts[name, wanted] if (name, wanted) in contexts else key_with(table, name, wanted)
            for value in values_of(key, entry):
                if (converted := entry.converted(value)) is not None:
                    yield prefix + key, value, beside, dict.fromkeys(entry.paths, converted)


def key_with(table: KeyTable, key: str, wanted: Any) -> dict[str, Any]:
    """What sets a key to the value of a condition."""
    default = table.default_of(key)
    if not isinstance(wanted, bool):
        return {key: wanted}
    return {} if is_off(default) is not wanted else {key: {bool: wanted, int: 3}[type(default)]}


def assert_set(config: Any, fields: dict[str, Any]) -> None:
    for path, expected in fields.items():
        field = config
        for name in path.split("."):
            field = field[name] if isinstance(field, Mapping) else getattr(field, name)
        assert plain(field) == plain(expected), path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = TinyModel.Config(alphabet="0123456789+=", layers=1, hidden=8, heads=2, mlp=8, max_position=64)
    return str(TinyModel(sizes, seed=0).materialize(tmp_path_factory.mktemp("model") / "tiny"))


_ROLE = "actor_rollout_ref"
_LOSSES = ("ppo", "gspo", "gmpo", "cispo", "clip_cov", "kl_cov", "sapo")
OF_VERL: dict[tuple[str, Any], dict[str, Any]] = {
    **{("advantage", name): {"algorithm.adv_estimator": name} for name in ("gae", "grpo", "grpo_passk")},
    ("advantage", "reinforce_plus_plus"): {"algorithm.adv_estimator": "reinforce_plus_plus"},
    **{("loss", name): {f"{_ROLE}.actor.policy_loss.loss_mode": name} for name in _LOSSES},
    ("loss", "ppo"): {f"{_ROLE}.actor.policy_loss.loss_mode": "vanilla"},
    ("loss", "gmpo"): {f"{_ROLE}.actor.policy_loss.loss_mode": "geo_mean"},
    ("engine", "vllm"): {f"{_ROLE}.rollout.name": "vllm"},
    ("device", "cuda"): {"trainer.device": "cuda"},
    ("conversation", True): {f"{_ROLE}.rollout.multi_turn.enable": True},
}
"""Condition of rows of verl's table that is no key -> keys with which it holds."""


@pytest.mark.parametrize(("key", "value", "beside", "fields"), [*cases_of(VERL, OF_VERL)])
def test_a_row_of_verl_sets_its_fields(
    model: str, key: str, value: Any, beside: dict[str, Any], fields: dict[str, Any]
) -> None:
    base = {
        "data.train_batch_size": 8,
        "data.max_prompt_length": 16,
        "data.max_response_length": 4,
        f"{_ROLE}.model.path": model,
        f"{_ROLE}.actor.ppo_mini_batch_size": 4,
        f"{_ROLE}.rollout.n": 2,
        f"{_ROLE}.rollout.val_kwargs.do_sample": True,
        f"{_ROLE}.rollout.val_kwargs.temperature": 1.0,
        "trainer.resume_from_path": "/saved" if value == "resume_path" else None,
        "trainer.device": "cpu",
    }
    config = {**base, **beside, key: value}
    run = translated(settings_of(nested(config)), rows=20, has_validation=True, device=config["trainer.device"])
    tasks = {"train": {"kind": "arithmetic"}, "val": {"kind": "arithmetic"}}
    run |= {"tasks": tasks, "rewards": ["exact"]}
    assert_set(run if key in OF_A_MODEL else config_from_mapping(run), fields)


_TASKSET = "buffer.explorer_input.taskset"
OF_TRINITY: dict[tuple[str, Any], dict[str, Any]] = {
    ("mode", "explore"): {"mode": "explore"},
    ("mode", "serve"): {"mode": "serve", _TASKSET: None, "trainer.total_steps": 3},
    ("learning from rows", False): {},
}
"""Condition of rows of Trinity-RFT's tables that is no key -> keys with which it holds."""
_TRAINER_CONFIG = "trainer.trainer_config."


@pytest.mark.parametrize(
    ("key", "value", "beside", "fields"),
    [*cases_of(TRINITY, OF_TRINITY), *cases_of(TRAINER_CONFIG, OF_TRINITY, _TRAINER_CONFIG)],
)
def test_a_row_of_trinity_sets_its_fields(
    model: str, key: str, value: Any, beside: dict[str, Any], fields: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(8 * '{"question": "1+1=", "answer": "2"}\n')
    columns = {"prompt_key": "question", "response_key": "answer"}
    base = {
        "model": {"model_path": model, "max_model_len": 64, "max_response_tokens": 4},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 4},
        "buffer.batch_size": 4,
        "buffer.explorer_input.default_workflow_type": "math_workflow",
        _TASKSET: {"path": str(tmp_path / "rows.jsonl"), "format": columns},
    }
    run = translate(nested({**base, **beside, key: value}), device="cpu").config
    assert_set(run if key in OF_A_MODEL else config_from_mapping(run), fields)
