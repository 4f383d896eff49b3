"""Translates the names of Trinity-RFT's workflows and reward functions to a workflow and rewards of Trivium."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trivium.frontdoors.tables import Settings
from trivium.frontdoors.trinity.trinity_config import TrinityConfig
from trivium.registry import suggest

INPUT = "buffer.explorer_input"
_HERE = "trivium.frontdoors.trinity.reward_functions"
_THINK = (
    "Think about the question first, then answer it. Put your reasoning between <think> and </think>, and the final "
    "answer alone between <answer> and </answer>, like this: <think> reasoning </think> <answer> answer </answer>"
)
_BOXED = "Reason step by step, and write your final answer in \\boxed{}."
_THINK_BOXED = (
    "Solve the problem. Reason first, between <think> and </think>, then write your final answer in closed form "
    "in \\boxed{}."
)


@dataclass(frozen=True)
class Judged:
    """The workflow and rewards of a taskset."""

    rewards: tuple[Mapping[str, Any], ...] = ()
    workflow: Mapping[str, Any] = field(default_factory=lambda: {"kind": "single_turn"})
    system: str | None = None
    """The system message of tasks without one."""
    reads_answer: bool = True
    """Whether the rewards read the column with the answer."""
    masks_truncated: bool = False
    shaping: tuple[Mapping[str, Any], ...] = ()


def _reward(name: str, **options: Any) -> dict[str, Any]:
    """Returns a reward of `reward_functions.py`, under the name of its metric in Trinity-RFT."""
    labels = {"Accuracy": "accuracy", "Boxed": "accuracy", "Dapo": "accuracy", "Countdown": "score"}
    return {"kind": f"{_HERE}:{name}", "name": labels.get(name, "format_score"), **options}


_FORMAT_OF_MATH = r".*?<think>.*?</think>\s*<answer>.*?</answer>\s*$"
_REWARDS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "math_reward": (_reward("Accuracy"), _reward("Format", pattern=_FORMAT_OF_MATH)),
    "math_boxed_reward": (_reward("Boxed"),),
    "format_reward": (_reward("Format"),),
    "accuracy_reward": ({"kind": "math_verify", "name": "accuracy"},),
    "countdown_reward": (_reward("Countdown"),),
    "math_dapo_reward": (_reward("Dapo"),),
}
"""Reward functions by name -> the rewards that sum up to them."""
_SIMPLE = (
    "simple_workflow",
    "async_simple_workflow",
    "simple_mm_workflow",
    "async_simple_mm_workflow",
    "on_policy_distill_workflow",
)
_MATH = ("math_workflow", "async_math_workflow", "on_policy_distill_math_workflow")
_MATH_BOXED = ("math_boxed_workflow", "async_math_boxed_workflow", "math_eval_workflow", "async_math_eval_workflow")
_ASKING = "an environment is workflow.kind multi_turn, a workflow of yours a class with `async run(task, policy)`"
_INSTEAD = {
    "math_rm": "a reward model is rewards: [{kind: model, path: ...}] in the result",
    "ruler": "a judge is a reward of yours that asks it: default_reward_fn_type: file.py:Name",
    "rubric": "a judge is a reward of yours that asks it: default_reward_fn_type: file.py:Name",
    "tool_call": "tools are a workflow of yours: default_workflow_type: file.py:Name",
    "agentscope": "an agent that speaks HTTP is trained by run.mode serve (docs/serve.md)",
    "as_react": "an agent that speaks HTTP is trained by run.mode serve (docs/serve.md)",
}
"""Part of the name of an unsupported workflow -> its replacement."""


def judged_in_training(trinity: TrinityConfig) -> Judged:
    """Returns the workflow and rewards of the training taskset; those of the evaluation taskset if there is no training
    taskset."""
    tasksets = [*trinity.tasksets, *trinity.eval_tasksets]
    return judged(trinity, tasksets[0], f"{INPUT}.taskset") if tasksets and not trinity.offline else Judged()


def judged(trinity: TrinityConfig, settings: Settings, where: str) -> Judged:
    """Returns the workflow and rewards of a taskset. Notes a problem for an unknown name."""
    evaluated = ".eval_tasksets" in where
    kinds = [settings["default_workflow_type"]]
    kinds += (
        [settings["default_eval_workflow_type"], trinity[f"{INPUT}.default_eval_workflow_type"]] if evaluated else []
    )
    workflow = next((kind for kind in [*kinds, trinity[f"{INPUT}.default_workflow_type"]] if kind), None)
    reward = settings["default_reward_fn_type"] or trinity[f"{INPUT}.default_reward_fn_type"]
    if workflow is None:
        do = "set default_workflow_type, math_workflow for example"
        trinity.problem(f"{where}.default_workflow_type", "a workflow", "nothing names one", do)
        return Judged()
    workflow = of_user(str(workflow))
    rewards = _rewards(trinity, of_user(str(reward)), settings, where) if reward else ()
    if workflow in _SIMPLE:
        if not reward and workflow != "on_policy_distill_workflow":
            do = "set default_reward_fn_type, math_reward for example"
            trinity.problem(f"{where}.default_reward_fn_type", "rewards", f"{workflow} has none of its own", do)
        return Judged(rewards, reads_answer=bool(reward), shaping=_overlong(settings))
    if workflow in _MATH:
        math = reward in (None, "math_reward")
        return Judged(rewards or _REWARDS["math_reward"], system=_THINK if math else None, shaping=_overlong(settings))
    if workflow in _MATH_BOXED:
        return _math_boxed(trinity, settings, where, rewards)
    if ":" in workflow:
        return Judged(rewards, {"kind": workflow, **settings["workflow_args"]}, reads_answer=bool(reward))
    do = next((text for part, text in _INSTEAD.items() if part in workflow), _ASKING)
    known = suggest(workflow, (*_SIMPLE, *_MATH, *_MATH_BOXED)) if do is _ASKING else ""
    trinity.problem(
        f"{where}.default_workflow_type", repr(workflow), "no such workflow here", f"{known}; {do}".strip("; ")
    )
    return Judged()


def of_user(name: str) -> str:
    """Converts the name of a user's class or function to Trivium's form: `package.module.Name` becomes
    `package.module:Name`, and a file of the working directory gets its full path. Other names stay unchanged."""
    module, dot, last = name.rpartition(".")
    name = f"{module}:{last}" if dot and ":" not in name else name
    file, is_file, attribute = name.rpartition(".py:")
    path = Path(f"{file}.py").expanduser()
    return f"{path.resolve()}:{attribute}" if is_file and path.is_file() else name


def _rewards(trinity: TrinityConfig, name: str, settings: Settings, where: str) -> tuple[Mapping[str, Any], ...]:
    """Returns the rewards that replace a reward function."""
    args = {key: value for key, value in settings["reward_fn_args"].items() if key not in _OVERLONG}
    if name in _REWARDS:
        for key, value in args.items():
            found = f"{name} has no such option"
            trinity.problem(f"{where}.reward_fn_args.{key}", f"{value!r:.80}", found, "leave it out")
        return _REWARDS[name]
    if ":" in name:
        return ({"kind": f"{_HERE}:RewardOfTrinity", "function": name, "args": args},)
    do = suggest(name, _REWARDS) + "; your own is file.py:Name or package.module:Name"
    trinity.problem(f"{where}.default_reward_fn_type", repr(name), "no such reward here", do)
    return ()


_OVERLONG = ("enable_overlong_penalty", "penalty_factor", "max_response_length", "cache_length")


def _overlong(settings: Settings) -> tuple[Mapping[str, Any], ...]:
    """Returns the penalty for completions near the length limit, as a shaping of the reward."""
    args = settings["reward_fn_args"]
    if not args.get("enable_overlong_penalty"):
        return ()
    longest, buffer = args.get("max_response_length") or 1, args.get("cache_length") or 1
    factor = args.get("penalty_factor") or 1.0
    return ({"kind": "overlong_penalty", "factor": factor, "buffer": buffer / longest, "limit": longest},)


def _math_boxed(
    trinity: TrinityConfig, settings: Settings, where: str, rewards: tuple[Mapping[str, Any], ...]
) -> Judged:
    """Translates math_boxed_workflow, which excludes truncated completions from the loss."""
    args = settings["workflow_args"]
    thinks = bool(args.get("with_think"))
    if args.get("use_base"):
        do = "leave it out, and set model.chat_template: plain in the result"
        trinity.problem(f"{where}.workflow_args.use_base", "true", "prompts go through the chat template", do)
    if not rewards:
        coef = args.get("format_score_coef") or 0.1
        rewards = (*_REWARDS["math_boxed_reward"], *([_reward("Thinks", coef=coef)] if thinks else ()))
    return Judged(
        rewards,
        system=_THINK_BOXED if thinks else _BOXED,
        masks_truncated=True,
        shaping=_overlong(settings),
    )
