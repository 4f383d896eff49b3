"""Translates tools, interactions and agent loops of verl's config to the section `workflow`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trivium.foundation.errors import Problem, TriviumError
from trivium.frontdoors.tables import Settings
from trivium.frontdoors.verl.config.conflicts import ROLLOUT
from trivium.frontdoors.verl.config.keys_of_conversations import FORMATS
from trivium.frontdoors.verl.objects.tool_classes import load_functions, load_interactions, load_tools

_TURNS = f"{ROLLOUT}.multi_turn"
_LOOP = f"{ROLLOUT}.agent.default_agent_loop"
_FILES = {
    f"{_TURNS}.tool_config_path": load_tools,
    f"{_TURNS}.function_tool_path": load_functions,
    f"{_TURNS}.interaction_config_path": load_interactions,
}
"""Key of a file -> the function that reads it."""


def has_conversation(verl: Settings) -> bool:
    """Whether rollouts have several turns."""
    named = any(verl[key] for key in _FILES)
    return named or bool(verl[f"{_TURNS}.enable"]) or verl[_LOOP] == "tool_agent"


def workflow_of(verl: Settings, problems: list[Problem]) -> dict[str, Any]:
    """Returns the workflow, without the fields that rows of the table set; empty for one turn."""
    if verl[_LOOP] not in ("single_turn_agent", "tool_agent") or verl[f"{ROLLOUT}.agent.agent_loop_config_path"]:
        cause = "an agent loop of your own requests tokens from verl's inference servers"
        do = "write it as a workflow (docs/extend-workflow.md), and use workflow.kind in a RunConfig"
        key = _LOOP if verl.has(_LOOP) else f"{ROLLOUT}.agent.agent_loop_config_path"
        problems.append(Problem(key, repr(verl[key]), cause, do))
    if not has_conversation(verl):
        return {}
    for key, load in _FILES.items():
        problems += _problems(key, verl[key] or "", load)
    if (notation := verl[f"{_TURNS}.format"]) not in FORMATS:
        do = f"use one of {', '.join(FORMATS)}, and a model that is trained on it"
        cause = "tool calls are read in the notations of Hermes and Llama"
        problems.append(Problem(f"{_TURNS}.format", repr(notation), cause, do))
    return {
        "kind": "multi_turn",
        "environment": "trivium.frontdoors.verl.tool_environment:ToolEnvironment",
        "max_turns": verl["data.max_response_length"],  # a turn has a token or more, so the context is the limit
    }


def _problems(key: str, file: str, load: Any) -> list[Problem]:
    """Returns the problem of a file on this machine whose classes cannot be built."""
    if not Path(file).is_file():
        return []
    try:
        load(file)
    except TriviumError as error:
        return [Problem(key, error.asked, error.found, error.do)]
    return []
