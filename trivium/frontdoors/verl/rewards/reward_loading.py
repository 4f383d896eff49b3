"""Loads reward managers from configs in verl's layout, and computes rewards with them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trivium.foundation.errors import ConfigError, RewardError, TriviumError
from trivium.foundation.registry import resolve
from trivium.frontdoors.keywords import accepted, accepts
from trivium.frontdoors.plain_values import Section, plain, resolved
from trivium.frontdoors.tables import Settings, refuse
from trivium.frontdoors.verl.config.config_table import TABLE
from trivium.frontdoors.verl.objects.batches.batch_view import BatchView, Scored, scored_rows
from trivium.frontdoors.verl.rewards.reward_bases import each_single, get_reward_manager_cls
from trivium.frontdoors.verl.rewards.scorer import default_compute_score
from trivium.models.late import torch
from trivium.types import Group

if TYPE_CHECKING:
    from torch import Tensor

RewardManager = Callable[..., Any]


def compute_reward(data: BatchView, reward_fn: RewardManager) -> tuple[Tensor, dict[str, Any]]:
    """Returns the rewards (B, R) of a batch and the extra information by name. Calls `reward_fn` once.

    Raises the manager's exception as a RewardError, or unchanged if it is a TriviumError.
    """
    try:
        # One call. verl calls again without `return_dict` after any exception, which hides errors and scores twice.
        if not callable(reward_fn) and hasattr(reward_fn, "run_single"):
            result = each_single(reward_fn, data, return_dict=True)
        else:
            result = reward_fn(data, return_dict=True) if accepts(reward_fn, "return_dict") else reward_fn(data)
    except TriviumError:
        raise
    except Exception as error:
        raise RewardError(
            f"rewards of {len(data)} samples from {_name(reward_fn)}",
            f"{type(error).__name__}: {error}",
            "fix the reward manager",
        ) from error
    return as_rewards(result, _name(reward_fn))


def as_rewards(result: object, who: str) -> tuple[Tensor, dict[str, Any]]:
    """Returns (rewards (B, R), extra information) from the result of `who`: a mapping, a pair, or only rewards."""
    rewards, extra = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if isinstance(result, Mapping):
        rewards, extra = result.get("reward_tensor"), dict(result.get("reward_extra_info") or {})
    if not isinstance(rewards, torch.Tensor):
        raise RewardError(
            f"a reward tensor from {who}",
            f"a {type(rewards).__name__}",
            "return a tensor (B, R), or {'reward_tensor': it, 'reward_extra_info': {name: B values}}",
        )
    return rewards, extra


def score_groups(
    groups: Sequence[Group], reward_fn: RewardManager, pad_token_id: int, *, meta_info: Mapping[str, Any] | None = None
) -> list[Scored]:
    """Scores the trajectories of the groups that did not fail, in order (`batch_view.living`).

    The manager receives them as one batch. Raises the errors of `compute_reward`, and DataError unless there is one
    finite reward per trajectory.
    """
    view = BatchView.of(groups, pad_token_id, meta_info=meta_info)
    if not len(view):
        return []
    rewards, extra = compute_reward(view, reward_fn)
    return scored_rows(rewards, view, extra)


def load_reward_manager(
    config: object, tokenizer: object, num_examine: int = 0, **reward_kwargs: object
) -> RewardManager:
    """Returns the reward manager of a config, with the config's scorer. `config` is a mapping or a similar object in
    the layout of any verl version: sections have the same keys at the top, below `reward_model` and below `reward`.

    - `reward_manager`: `naive` (default), `dapo`, `batch`, `prime`, a registered name, or your class (`file.py:Name`,
      `package.module:Name`); or `{source: register | importlib, name, module: {path}}`.
    - `reward_kwargs`: further arguments, which arguments of this call override; `overlong_buffer` sets two of them.
    - `custom_reward_function: {path, name, reward_kwargs}`: the scorer, by default `default_compute_score`.
    - `sandbox_fusion.memory_limit_mb`: memory limit of programs, which run on this machine. A `url` is refused.

    Raises ConfigError for a manager that cannot be built and for keys that contradict each other, UnknownName for an
    unknown name.
    """
    verl = _settings(config)
    score = _scorer_of(verl)  # first: its file may register the manager
    kind, manager = _manager_of(verl)
    options = reward_kwargs_of(verl)
    if "config" in inspect.signature(manager).parameters:  # a manager of verl 0.7 reads its arguments there
        # The trainer passes the reward_kwargs of its config, which such a manager has in `config` already.
        beside = {name: value for name, value in reward_kwargs.items() if name not in options or value != options[name]}
        arguments = {"config": _with_rewards(config, options), "tokenizer": tokenizer, "compute_score": score, **beside}
        optional = {"reward_router_address": None, "reward_model_tokenizer": None}
    else:
        examined = {"tokenizer": tokenizer, "num_examine": num_examine, "compute_score": score}
        arguments = {**examined, **options, **reward_kwargs}
        optional = {"reward_fn_key": verl["data.reward_fn_key"]}
    arguments = accepted(manager, optional) | arguments
    try:
        inspect.signature(manager).bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"the reward manager {kind!r}",
            f"{error}; its arguments are {inspect.signature(manager)}",
            "fix reward_model.reward_kwargs",
        ) from error
    return manager(**arguments)


def load_compute_score(config: object) -> Callable[..., Any]:
    """Returns the scorer that a config names (`custom_reward_function`), or `default_compute_score`."""
    return _scorer_of(_settings(config))


_SECTIONS = ("reward_manager", "reward_model", "custom_reward_function", "sandbox_fusion", "reward", "data")
_READ = (
    *("reward_manager", "custom_reward_function", "sandbox_fusion", "reward_kwargs", "overlong_buffer"),
    *("reward_loop_", "reward_fn_key"),
)
"""Prefixes of the keys, or of parts of keys, that are read here."""


def _settings(config: object) -> Settings:
    """Reads the sections of rewards. Raises ConfigError for problems in the keys that are read."""
    whole = plain(config)
    verl = TABLE.read(resolved(whole) if isinstance(whole, dict) else {})
    parts = {problem.where: problem.where.split(".") for problem in verl.problems}
    refuse(
        [
            problem
            for problem in verl.problems
            if parts[problem.where][0] in _SECTIONS and any(part.startswith(_READ) for part in parts[problem.where])
        ],
        "a reward manager that can be loaded",
    )
    return verl


def reward_kwargs_of(verl: Settings) -> dict[str, Any]:
    """Returns further arguments of the manager. An enabled `overlong_buffer` also sets the longest response."""
    buffer = verl["reward_model.overlong_buffer"] or {}
    longest = {"overlong_buffer_cfg": buffer, "max_resp_len": verl["data.max_response_length"]}
    return (longest if buffer.get("enable") else {}) | (verl["reward_model.reward_kwargs"] or {})


def _scorer_of(verl: Settings) -> Callable[..., Any]:
    if path := verl["custom_reward_function.path"]:
        function = resolve("rewards", address(path, verl["custom_reward_function.name"]))
        options = verl["custom_reward_function.reward_kwargs"] or {}
        return functools.partial(function, **options) if options else function
    limit = verl.values.get("reward_model.sandbox_fusion.memory_limit_mb")
    return functools.partial(default_compute_score, memory_limit_mb=limit) if limit else default_compute_score


def _manager_of(verl: Settings) -> tuple[str, RewardManager]:
    """Returns (the manager's name in the config, its class)."""
    name, path = verl["reward_manager.name"], verl["reward_manager.module.path"]
    if verl["reward_manager.source"] == "importlib":
        if not path:
            raise ConfigError("reward_manager.module.path", "nothing", "name the manager's file or package")
        return name, resolve("reward_managers", address(path, name))
    if path:
        raise ConfigError(
            f"reward_manager.module.path {path!r}",
            f"reward_manager.source is 'register', and {name!r} is looked up among the registered names",
            f"set source: importlib and name to a class of {path}, or leave module.path out",
        )
    return name, get_reward_manager_cls(name)


def _with_rewards(config: Any, reward_kwargs: Mapping[str, Any]) -> Any:
    """Returns the config for a manager of verl 0.7: with attributes, and a section `reward`."""
    if isinstance(config, dict):
        return Section.of({"reward": {"reward_kwargs": dict(reward_kwargs)}, **config})
    return config


def address(path: str, name: str) -> str:
    """Returns the registry address of a name in a file or a package (`pkg://package.module`)."""
    return f"{path.removeprefix('pkg://').removeprefix('file://')}:{name}"


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
