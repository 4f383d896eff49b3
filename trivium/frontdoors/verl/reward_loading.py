"""From a config of verl's shape to a reward manager, and from a manager to rewards."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

from torch import Tensor

from trivium.errors import ConfigError, RewardError, TriviumError
from trivium.frontdoors.verl.batch_view import BatchView, Scored, scored_rows
from trivium.frontdoors.verl.reward_managers import read
from trivium.registry import resolve
from trivium.rewards.by_source import default_compute_score
from trivium.types import Group

RewardManager = Callable[..., Any]


def compute_reward(data: Sized, reward_fn: RewardManager) -> tuple[Tensor, dict[str, Any]]:
    """The rewards (B, R) of a batch and the extra information, by name; `reward_fn` is called once.

    Raises what the manager raises, as a RewardError unless it is a TriviumError.
    """
    try:
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


def load_reward_manager(config: object, tokenizer: object, num_examine: int, **reward_kwargs: object) -> RewardManager:
    """The manager that a config names, with the scorer that it names. `config` is a mapping, or an object like one.

    - `reward_model.reward_manager`: `naive` (default), `dapo`, `batch`, or a class of your own (`file.py:Name`,
      `package.module:Name`); or `reward_manager: {source: register | importlib, name, module: {path}}`.
    - `reward_model.reward_kwargs`: its further arguments, which `reward_kwargs` override.
    - `custom_reward_function: {path, name, reward_kwargs}`: the scorer; `default_compute_score` where there is none.
    - `reward_model.sandbox_fusion.memory_limit_mb`: for programs. A `url` there is refused: programs run here.

    Raises ConfigError for what it cannot build, UnknownName for a name that there is not.
    """
    section = read(config, "reward_model", {})
    kind = _manager_name(config, section)
    manager = resolve("reward_managers", kind)
    arguments = {**_mapping(read(section, "reward_kwargs", {})), **reward_kwargs}
    arguments = {
        "tokenizer": tokenizer,
        "num_examine": num_examine,
        "compute_score": load_compute_score(config),
        "reward_fn_key": read(read(config, "data", {}), "reward_fn_key", "data_source"),
        **arguments,
    }
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
    custom = read(config, "custom_reward_function", {})
    path = read(custom, "path", "")
    if path:
        function = _from_file(path, read(custom, "name", "compute_score"))
        options = _mapping(read(custom, "reward_kwargs", {}))
        return functools.partial(function, **options) if options else function
    fusion = read(read(config, "reward_model", {}), "sandbox_fusion", {})
    if url := read(fusion, "url", ""):
        raise ConfigError(
            "reward_model.sandbox_fusion.url",
            str(url),
            "leave it out: programs run in a sandbox on this machine (docs/extend-rewards.md)",
        )
    limit = read(fusion, "memory_limit_mb")
    return functools.partial(default_compute_score, memory_limit_mb=limit) if limit else default_compute_score


def _manager_name(config: object, section: object) -> str:
    named = read(section, "reward_manager") or read(config, "reward_manager") or "naive"
    if isinstance(named, str):
        return named
    name = read(named, "name", "naive")
    if read(named, "source", "register") == "register":
        return name
    path = read(read(named, "module", {}), "path", "")
    if not path:
        raise ConfigError("reward_manager.module.path", "nothing", "say which file or package defines the manager")
    return address(path, name)


def _from_file(path: str, name: str) -> Callable[..., Any]:
    return resolve("rewards", address(path, name))


def address(path: str, name: str) -> str:
    """The registry's kind of a name in a file or a package (`pkg://package.module`)."""
    return f"{path.removeprefix('pkg://').removeprefix('file://')}:{name}"


def _mapping(config: Any) -> dict[str, Any]:
    """A mapping, or what an object has for attributes."""
    return dict(config) if hasattr(config, "keys") else dict(vars(config))


def _takes(function: Callable[..., Any], name: str) -> bool:
    """Whether it can be called with this keyword."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
