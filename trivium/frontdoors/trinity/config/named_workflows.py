"""Translates the names of Trinity-RFT's workflows and reward functions to a workflow and rewards of Trivium."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trivium.foundation.errors import TriviumError
from trivium.foundation.registry import resolve, suggest
from trivium.frontdoors.tables import Settings
from trivium.frontdoors.trinity.config.registries import PLUGIN_DIRS, path_of
from trivium.frontdoors.trinity.config.reward_names import HERE, REFUSED_REWARDS, REWARDS, reward
from trivium.frontdoors.trinity.config.trinity_config import TrinityConfig

INPUT = "buffer.explorer_input"
_ADAPTER = "trivium.frontdoors.trinity.workflow_adapter:WorkflowOfTrinity"
_THINK = (
    "Think about the question first, then answer it. Put your reasoning between <think> and </think>, and the final "
    "answer alone between <answer> and </answer>, like this: <think> reasoning </think> <answer> answer </answer>"
)
_BOXED = "Reason step by step, and write your final answer in \\boxed{}."
_THINK_BOXED = (
    "Solve the problem. Reason first, between <think> and </think>, then write your final answer in closed form "
    "in \\boxed{}."
)
_RUBRIC = (
    "Judge the answer to the question by the rubric.\n\nQuestion:\n{prompt}\n\nRubric:\n{rubric}\n\n"
    "Answer:\n{completion}\n\nExplain in a few words, then end with a line `Rating: n`, n a number from 0 (worst) to "
    "10 (best)."
)
_RATING = r"(?i)\brating\s*[:=]\s*\**\s*(\d+(?:\.\d+)?)"


@dataclass(frozen=True)
class Judged:
    """The workflow and rewards of a taskset."""

    rewards: tuple[Mapping[str, Any], ...] = ()
    workflow: Mapping[str, Any] = field(default_factory=lambda: {"kind": "single_turn"})
    system: str | None = None
    """The system message of tasks without one."""
    reads_answer: bool = True
    """Whether the rewards read the column with the answer."""
    needs_prompt: bool = True
    """Whether a row has a prompt. False: the workflow makes one of the other columns."""
    masks_truncated: bool = False
    shaping: tuple[Mapping[str, Any], ...] = ()
    plain_template: bool = False
    """Whether prompts are plain text, without a chat template."""
    asks_models: bool = False
    """Whether it asks `explorer.auxiliary_models`."""


@dataclass(frozen=True)
class _Taskset:
    """A taskset whose workflow is translated, and what the config says about it."""

    trinity: TrinityConfig
    settings: Settings
    where: str
    name: str
    """The name of the workflow."""
    reward: str
    """The name of the reward function; empty if there is none."""

    def problem(self, key: str, wanted: str, cause: str, do: str) -> None:
        self.trinity.problem(f"{self.where}.{key}", wanted, cause, do)

    def rewards(self) -> tuple[Mapping[str, Any], ...]:
        """Returns the rewards that replace the reward function."""
        args = {key: value for key, value in self.settings["reward_fn_args"].items() if key not in _OVERLONG}
        if not self.reward:
            return ()
        if self.reward in REWARDS:
            for key, value in args.items():
                cause = f"{self.reward} has no such option"
                self.problem(f"reward_fn_args.{key}", f"{value!r:.80}", cause, "leave it out")
            return REWARDS[self.reward]
        path, is_refused = path_of(self.reward), self.reward in REFUSED_REWARDS
        if path is not None or (not is_refused and self.trinity.is_plugin(self.reward, [*REWARDS])):
            return ({"kind": f"{HERE}:RewardOfTrinity", "function": path or self.reward, "args": args},)
        do = suggest(self.reward, REWARDS) + "; your own is file.py:Name or package.module:Name"
        self.problem("default_reward_fn_type", repr(self.reward), "no such reward here", do)
        return ()

    def overlong(self) -> tuple[Mapping[str, Any], ...]:
        """Returns the penalty for completions near the length limit, as a shaping of the reward."""
        args = self.settings["reward_fn_args"]
        if not args.get("enable_overlong_penalty"):
            return ()
        longest, buffer = args.get("max_response_length") or 1, args.get("cache_length") or 1
        factor = args.get("penalty_factor") or 1.0
        return ({"kind": "overlong_penalty", "factor": factor, "buffer": buffer / longest, "limit": longest},)


_OVERLONG = ("enable_overlong_penalty", "penalty_factor", "max_response_length", "cache_length")


def _math(taskset: _Taskset) -> Judged:
    is_default = taskset.reward in ("", "math_reward")
    rewards = taskset.rewards() or REWARDS["math_reward"]
    return Judged(rewards, system=_THINK if is_default else None, shaping=taskset.overlong())


def _boxed(taskset: _Taskset) -> Judged:
    """Translates math_boxed_workflow, which excludes truncated completions from the loss."""
    args, rewards = taskset.settings["workflow_args"], taskset.rewards()
    thinks = bool(args.get("with_think"))
    if not rewards:
        coef = args.get("format_score_coef") or 0.1
        rewards = (*REWARDS["math_boxed_reward"], *([reward("Thinks", coef=coef)] if thinks else ()))
    return Judged(
        rewards,
        system=_THINK_BOXED if thinks else _BOXED,
        masks_truncated=True,
        shaping=taskset.overlong(),
        plain_template=bool(args.get("use_base")),
    )


def _rubric(taskset: _Taskset) -> Judged:
    """Translates rubric_judge_workflow, which asks an auxiliary model behind an endpoint."""
    if not any(model.has("model_path") for model in taskset.trinity.auxiliary_models):
        do = "name it in explorer.auxiliary_models: [{model_path: ...}]"
        taskset.problem("default_workflow_type", f"{taskset.name!r}", "it asks a model that judges", do)
        return Judged()
    (first, *_) = taskset.trinity.endpoints()
    judge = {"kind": "generative_judge", "name": "rubric", "template": _RUBRIC, "pattern": _RATING}
    return Judged(({**judge, **first},), asks_models=True)


def _frozen_lake(taskset: _Taskset) -> Judged:
    args = taskset.settings["workflow_args"]
    workflow = {
        "kind": "multi_turn",
        "environment": "trivium.frontdoors.trinity.frozen_lake:FrozenLake",
        "environment_args": {
            "env_max_steps": args.get("env_max_steps", 8),
            "is_slippery": args.get("is_slippery", False),
        },
        "max_turns": args.get("agent_max_steps") or 10,
    }
    return Judged((), workflow, reads_answer=False, needs_prompt=False)


_BY_NAME: Mapping[str, Callable[[_Taskset], Judged]] = {
    "math_workflow": _math,
    "on_policy_distill_math_workflow": _math,
    "math_boxed_workflow": _boxed,
    "rubric_judge_workflow": _rubric,
    "frozen_lake_workflow": _frozen_lake,
}
"""The workflows of Trinity-RFT that are built in."""

_CLASS = "a class of yours, file.py:Name, derived from trivium.frontdoors.trinity.Workflow (docs/trinity.md)"
_SIMPLE = f"write trivium.frontdoors.trinity:SimpleWorkflow with a default_reward_fn_type, or {_CLASS}"
_AGENT = f"train the agent by its HTTP calls with run.mode serve (docs/serve.md), or write {_CLASS}"
_WORLD = f"write workflow.kind: multi_turn over an environment of yours (docs/extend-workflow.md), or {_CLASS}"
_REWARD = "use math_workflow, and write the reward into the translated config: rewards: [{kind: model, path: ...}]"
_GROUP = "use rubric_judge_workflow, or math_workflow with a default_reward_fn_type of yours, file.py:Name"
_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("simple_workflow", "async_simple_workflow", "simple_mm_workflow", "async_simple_mm_workflow"), _SIMPLE
    ),
    **dict.fromkeys(("async_math_workflow", "on_policy_distill_workflow"), "use math_workflow"),
    **dict.fromkeys(
        ("async_math_boxed_workflow", "math_eval_workflow", "async_math_eval_workflow"), "use math_boxed_workflow"
    ),
    **dict.fromkeys(("math_rm_workflow", "async_math_rm_workflow"), _REWARD),
    **dict.fromkeys(("math_ruler_workflow", "async_math_ruler_workflow", "math_trainable_ruler_workflow"), _GROUP),
    "rubric_judge_openai_workflow": "use rubric_judge_workflow",
    "tool_call_workflow": f"use math_workflow with a default_reward_fn_type of yours, or write {_CLASS}",
    **dict.fromkeys(
        (
            "agentscope_workflow_adapter",
            "agentscope_workflow_adapter_v1",
            "agentscope_react_workflow",
            "as_react_workflow",
            "agentscope_react_math_workflow",
            "agentscope_v1_react_search_workflow",
            "agentscopev0_react_math_workflow",
            "email_search_workflow",
        ),
        _AGENT,
    ),
    **dict.fromkeys(
        (
            "alfworld_workflow",
            "step_wise_alfworld_workflow",
            "RAFT_alfworld_workflow",
            "RAFT_reflect_alfworld_workflow",
            "sciworld_workflow",
            "webshop_workflow",
            "intercode_sql_workflow",
            "sudoku_workflow",
        ),
        _WORLD,
    ),
}
"""The other names of Trinity-RFT -> what to write instead."""
NAMES = (*_BY_NAME, *_REFUSED)


def judged_in_training(trinity: TrinityConfig) -> Judged:
    """Returns the workflow and rewards of the training taskset; those of the evaluation taskset if there is no training
    taskset."""
    tasksets = [*trinity.tasksets, *trinity.eval_tasksets]
    if not tasksets or trinity.offline:
        return Judged()
    where = f"{INPUT}.taskset" if trinity.tasksets else f"{INPUT}.eval_tasksets"
    return judged(trinity, tasksets[0], where)


def judged(trinity: TrinityConfig, settings: Settings, where: str) -> Judged:
    """Returns the workflow and rewards of a taskset. Notes a problem for an unknown name."""
    evaluated = ".eval_tasksets" in where
    kinds = [settings["default_workflow_type"]]
    kinds += (
        [settings["default_eval_workflow_type"], trinity[f"{INPUT}.default_eval_workflow_type"]] if evaluated else []
    )
    name = next((kind for kind in [*kinds, trinity[f"{INPUT}.default_workflow_type"]] if kind), None)
    reward_fn = settings["default_reward_fn_type"] or trinity[f"{INPUT}.default_reward_fn_type"]
    taskset = _Taskset(trinity, settings, where, str(name), str(reward_fn or ""))
    if name is None:
        do = "set default_workflow_type, math_workflow for example"
        taskset.problem("default_workflow_type", "a workflow", "nothing names one", do)
    elif taskset.name in _BY_NAME:
        return _BY_NAME[taskset.name](taskset)
    elif taskset.name in _REFUSED:
        taskset.problem("default_workflow_type", repr(name), "it is not built in", _REFUSED[taskset.name])
    elif path_of(taskset.name) is not None or trinity.is_plugin(taskset.name, NAMES):
        return _of_user(taskset)
    else:
        taskset.problem("default_workflow_type", repr(name), "no such workflow", suggest(taskset.name, _BY_NAME))
    return Judged()


def _of_user(taskset: _Taskset) -> Judged:
    """Translates a workflow of the user: a class of Trivium's form, or of Trinity-RFT's."""
    settings, path = taskset.settings, path_of(taskset.name)
    if path is not None and _is_of_trivium(path):
        return Judged(taskset.rewards(), {"kind": path, **settings["workflow_args"]}, reads_answer=bool(taskset.reward))
    sampling_keys = ("temperature", "top_p", "top_k", "max_tokens")
    names = [name for name in sampling_keys if settings.has(f"rollout_args.{name}")]
    rollout_args = {name: settings[f"rollout_args.{name}"] for name in names}
    keys = ("prompt_key", "response_key", "system_prompt")
    rewards = taskset.reward and (path_of(taskset.reward) or taskset.reward)
    section: dict[str, Any] = {
        "kind": _ADAPTER,
        "workflow": path or taskset.name,
        "workflow_args": settings["workflow_args"],
        "reward_fn": rewards,
        "reward_fn_args": settings["reward_fn_args"],
        "rollout_args": rollout_args,
        "format": {key: settings[f"format.{key}"] for key in keys if settings[f"format.{key}"] is not None},
        "auxiliary_models": [{"model": e["model"], "urls": e["urls"]} for e in taskset.trinity.endpoints()],
    }
    if path is None:
        taskset.trinity.note(
            f"{taskset.where}.default_workflow_type: {taskset.name!r} is looked up when the run starts: set "
            f"{PLUGIN_DIRS} to the folder of the module that registers it"
        )
    workflow = {name: value for name, value in section.items() if value not in ("", {}, [])}
    return Judged((), workflow, reads_answer=False, needs_prompt=False, asks_models=True)


def _is_of_trivium(path: str) -> bool:
    """Whether a class can be imported here and is not derived from the Workflow of this API."""
    # It imports torch, which the other configs are translated without.
    from trivium.frontdoors.trinity.objects.workflow_api import Workflow

    try:
        target = resolve("workflows", path)
    # The section of the adapter reports why it cannot be imported.
    except (TriviumError, ImportError):
        return False
    return not (isinstance(target, type) and issubclass(target, Workflow))
