"""From a config of verl's shape to a reward manager, and from a manager to rewards."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from trivium.errors import ConfigError, RewardError, TriviumError
from trivium.frontdoors.plain_values import plain, resolved
from trivium.frontdoors.tables import Settings, refuse
from trivium.frontdoors.verl.batch_view import BatchView, Scored, scored_rows
from trivium.frontdoors.verl.config_table import TABLE
from trivium.frontdoors.verl.reward_bases import each_single, get_reward_manager_cls
from trivium.frontdoors.verl.scorer import default_compute_score
from trivium.registry import resolve
from trivium.types import Group

RewardManager = Callable[..., Any]


def compute_reward(data: BatchView, reward_fn: RewardManager) -> tuple[Tensor, dict[str, Any]]:
    """The rewards (B, R) of a batch and the extra information, by name; `reward_fn` is called once.

    Raises what the manager raises, as a RewardError unless it is a TriviumError.
    """
    try:
        if not callable(reward_fn) and hasattr(reward_fn, "run_single"):
            given = each_single(reward_fn, data, return_dict=True)
        else:
            given = reward_fn(data, return_dict=True) if _takes(reward_fn, "return_dict") else reward_fn(data)
    except TriviumError:
        raise
    except Exception as error:
        raise RewardError(
            f"rewards of {len(data)} samples from {_name(reward_fn)}",
            f"{type(error).__name__}: {error}",
            "fix the reward manager; its own message is above",
        ) from error
    return as_rewards(given, _name(reward_fn))


def as_rewards(given: object, who: str) -> tuple[Tensor, dict[str, Any]]:
    """(rewards (B, R), extra information) of whatever `who` gave: a mapping of the two, a pair, or rewards alone."""
    rewards, extra = given if isinstance(given, tuple) and len(given) == 2 else (given, {})
    if isinstance(given, Mapping):
        rewards, extra = given.get("reward_tensor"), dict(given.get("reward_extra_info") or {})
    if not isinstance(rewards, Tensor):
        raise RewardError(
            f"a reward tensor from {who}",
            f"a {type(rewards).__name__}",
            "return a tensor (B, R), or {'reward_tensor': it, 'reward_extra_info': {name: B values}}",
        )
    return rewards, extra


def score_groups(
    groups: Sequence[Group], reward_fn: RewardManager, pad_token_id: int, *, meta_info: Mapping[str, Any] | None = None
) -> list[Scored]:
    """What a manager gives the living trajectories of these groups, in order (`batch_view.living`).

    All of them are one batch for the manager. Raises as `compute_reward`, and DataError for rewards that are not one
    finite number per trajectory.
    """
    view = BatchView.of(groups, pad_token_id, meta_info=meta_info)
    if not len(view):
        return []
    rewards, extra = compute_reward(view, reward_fn)
    return scored_rows(rewards, view, extra)


def load_reward_manager(
    config: object, tokenizer: object, num_examine: int = 0, **reward_kwargs: object
) -> RewardManager:
    """The manager that a config names, with the scorer that it names. `config` is a mapping, or an object like one, in
    the layout of any version: sections have the same keys at the top, below `reward_model` and below `reward`.

    - `reward_manager`: `naive` (default), `dapo`, `batch`, `prime`, a name that is registered, or a class of your own
      (`file.py:Name`, `package.module:Name`); or `{source: register | importlib, name, module: {path}}`.
    - `reward_kwargs`: its further arguments, which those of the call override; `overlong_buffer` is two of them.
    - `custom_reward_function: {path, name, reward_kwargs}`: the scorer; `default_compute_score` where there is none.
    - `sandbox_fusion.memory_limit_mb`: for programs. A `url` there is refused: programs run here.

    Raises ConfigError for what it cannot build and for keys that contradict each other, UnknownName for a name that
    there is not.
    """
    verl = _settings(config)
    score = _scorer_of(verl)  # first: its file may register the manager
    kind, manager = _manager_of(verl)
    own = reward_kwargs_of(verl)
    if "config" in inspect.signature(manager).parameters:  # of one sample at a time: it reads its arguments there
        beside = {name: value for name, value in reward_kwargs.items() if name not in own or value != own[name]}
        arguments = {"config": _with_rewards(config, own), "tokenizer": tokenizer, "compute_score": score, **beside}
        optional = {"reward_router_address": None, "reward_model_tokenizer": None}
    else:
        examined = {"tokenizer": tokenizer, "num_examine": num_examine, "compute_score": score}
        arguments = {**examined, **own, **reward_kwargs}
        optional = {"reward_fn_key": verl["data.reward_fn_key"]}
    arguments = {name: value for name, value in optional.items() if _takes(manager, name)} | arguments
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
    """The scorer that a config names (`custom_reward_function`), or `default_compute_score`."""
    return _scorer_of(_settings(config))


_SECTIONS = ("reward_manager", "reward_model", "custom_reward_function", "sandbox_fusion", "reward", "data")
_READ = (
    *("reward_manager", "custom_reward_function", "sandbox_fusion", "reward_kwargs", "overlong_buffer"),
    *("reward_loop_", "reward_fn_key"),
)
"""What a key that is read here, or one of its parts, begins with."""


def _settings(config: object) -> Settings:
    """The sections of rewards. Raises ConfigError for what is wrong in what is read of them."""
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
    """What the manager is built with besides: an `overlong_buffer` is that of the longest response."""
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
    """(what the config calls it, the class)."""
    name, path = verl["reward_manager.name"], verl["reward_manager.module.path"]
    if verl["reward_manager.source"] == "importlib":
        if not path:
            raise ConfigError("reward_manager.module.path", "nothing", "say which file or package defines the manager")
        return name, resolve("reward_managers", address(path, name))
    if path:
        raise ConfigError(
            f"reward_manager.module.path {path!r}",
            f"reward_manager.source is 'register', and {name!r} a name that is registered",
            f"set source: importlib and name to a class of {path}, or leave module.path out",
        )
    return name, get_reward_manager_cls(name)


def _with_rewards(config: Any, reward_kwargs: Mapping[str, Any]) -> Any:
    """The config as a manager of the later kind reads it: with attributes, and a section `reward`."""
    if isinstance(config, dict):
        return _Attributes({"reward": {"reward_kwargs": dict(reward_kwargs)}, **config})
    return config


class _Attributes(dict[str, Any]):
    """A mapping whose keys are attributes too, all the way down."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__({key: _Attributes(v) if isinstance(v, dict) else v for key, v in config.items()})

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the config has no key {name!r}; there are: {', '.join(self)}") from None


def address(path: str, name: str) -> str:
    """The registry's kind of a name in a file or a package (`pkg://package.module`)."""
    return f"{path.removeprefix('pkg://').removeprefix('file://')}:{name}"


def _takes(function: Callable[..., Any], name: str) -> bool:
    """Whether it can be called with this keyword."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
