"""Translates LightRFT's flags to the section `rewards`: reward models, services, or else a rule per label."""

from __future__ import annotations

import json
from typing import Any

from trivium.errors import Problem
from trivium.frontdoors.lightrft.rule_rewards import EXAMPLES_RECIPE
from trivium.frontdoors.tables import Settings, is_off

_RULE = "trivium.frontdoors.lightrft.rule_rewards:RuleReward"
_HERE = "use PPOTrainerVL with a reward_fn, or rewards with weights in a Trivium config (kind: recipe)"


def rewards_of(lightrft: Settings, problems: list[Problem]) -> list[dict[str, Any]]:
    """Returns the section `rewards`. Adds unsupported settings to `problems`."""
    models, urls = reward_models(lightrft, problems), remote_urls(lightrft)
    if len(models) + len(urls) > 1:
        named = ", ".join([*models.values(), *urls])
        problems.append(Problem("reward_pretrain" if models else "remote_rm_url", named, "several rewards", _HERE))
    for url in urls:
        if url.endswith(".py"):
            do = "use python -m trivium.frontdoors.lightrft, or name a function of one completion in rewards"
            problems.append(Problem("remote_rm_url", url, "its reward_func scores a batch", do))
    if models:
        return [{"kind": "model", "path": path} for path in models.values()]
    if urls:
        columns = {"label_column": lightrft["label_key"], "reference_column": lightrft["reference_key"]}
        return [{"kind": "remote", "urls": [url], "protocol": "lightrft", **columns} for url in urls]
    component = {"kind": _RULE, "name": "boxed", "rule": "geo3k_rule", "reference_key": lightrft["reference_key"]}
    labels = {label: {"boxed": 1.0} for label in EXAMPLES_RECIPE}
    return [{"kind": "recipe", "column": lightrft["label_key"], "components": [component], "labels": labels}]


def reward_models(lightrft: Settings, problems: list[Problem]) -> dict[str, str]:
    """Parses name -> path of the reward models from JSON `{name: path}`, `name:path,...`, or one path."""
    value = lightrft["reward_pretrain"]
    if isinstance(value, str) and value.strip().startswith("{"):
        try:
            value = json.loads(value)
        except ValueError as error:
            do = 'write \'{"name": "path"}\', or {} for none'
            problems.append(Problem("reward_pretrain", value, f"no JSON: {error}", do))
            return {}
    if is_off(value) or value == {}:
        return {}
    if isinstance(value, dict):
        return {str(name): str(path) for name, path in value.items()}
    parts = value if isinstance(value, list | tuple) else str(value).split(",")
    named = [str(part).strip().rpartition(":") for part in parts if str(part).strip()]
    return {name or f"reward_{number}": path for number, (name, _, path) in enumerate(named)}


def remote_urls(lightrft: Settings) -> list[str]:
    """Returns the URLs of reward services and the files with a `reward_func`."""
    value = lightrft["remote_rm_url"]
    parts = value if isinstance(value, list | tuple) else str(value or "").split(",")
    return [str(part).strip() for part in parts if str(part).strip()]
