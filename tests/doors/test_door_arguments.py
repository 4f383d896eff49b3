"""Every parameter of the front doors is read, or its place below says why it changes nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import trivium.frontdoors

DOORS = Path(trivium.frontdoors.__file__).parent
CHANGES_NOTHING = {
    "lightrft/objects/models/actor.py __init__": "use_flash_attention_2: attention is exact in any form",
    "lightrft/objects/models/critic.py __init__": "use_flash_attention_2: attention is exact in any form",
    "lightrft/objects/models/opening.py train": "mode: documented, gradients do not depend on it",
    "lightrft/objects/models/rollout_engine.py score": "the engine that a script calls judges nothing",
    "lightrft/objects/models/rollout_engine.py compare": "the engine that a script calls judges nothing",
    "lightrft/objects/step_algorithm.py objectives_at": "version: every step has the same update",
    "lightrft/objects/strategy.py prepare": "is_rlhf: models are prepared alike",
    "lightrft/objects/trainer_engine.py save": "on_copied: training waits",
    "trinity/config/registries.py register_module": "lazy: modules of plugins are imported with their folder",
    "trinity/workflow_adapter.py problems": "run: the workflow is found without it",
    "trinity/objects/workflow_model.py generate": "kwargs: texts are refused",
    "trinity/reward_functions.py __call__": "prompt: the arguments of a reward",
    "trinity/reward_functions.py __init__": "config: a reward without options",
    "trinity/monitor_views.py __init__": "resume_step: a class of the user appends",
    "trinity/monitor_views.py log": "commit: every row is written at once",
    "trinity/monitor_views.py monitor_of_run": "role: explorer and trainer of a run have one monitor",
    "verl/data.py __init__": "name, seed: the dataset holds rows of any name, in order",
    "verl/objects/launching.py copy_to_local": "cache_dir, use_shm, options: a local path is used where it is",
    "verl/main_ppo.py add_actor_rollout_worker": "config: the roles do not depend on it",
    "verl/objects/workers/model_workers.py offer": "weights: the worker group offers its own",
    "verl/objects/workers/model_workers.py save": "directory, on_copied: the worker group saves, and training waits",
    "verl/objects/datasets/rl_dataset.py create_rl_dataset": "is_train: both kinds are read alike",
    "verl/rewards/reward_bases.py init_class": "config, tokenizer: a hook",
    "verl/scored_reward.py __call__": "prompt: the arguments of a reward",
    "verl/rewards/scorer.py default_compute_score": "beside: what other scorers ask for",
    **dict.fromkeys(
        (f"verl/objects/tool_classes.py {name}" for name in ("create", "execute", "calc_reward", "calculate_score")),
        "all: hooks of base classes",
    ),
    "verl/objects/tool_classes.py start_interaction": "kwargs: a hook of a base class",
    "verl/objects/trainer.py _maybe_log_val_generations": "a hook",
}

OVERRIDABLE = {"_balance_batch", "_maybe_log_val_generations"}


def unread_parameters(path: Path) -> Iterator[tuple[str, str]]:
    """(function, parameter) of each public function with a body that never reads the parameter."""
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if all(isinstance(part, ast.Pass | ast.Raise | ast.Expr) for part in function.body):
            continue  # a protocol, an abstract method, or one that its docstring describes
        named = function.args
        parameters = [*named.posonlyargs, *named.args, *named.kwonlyargs, named.vararg, named.kwarg]
        read = {
            node.id
            for part in function.body
            for node in ast.walk(part)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        }
        for each in parameters:
            if each is not None and each.arg not in read | {"self", "cls", "_"} and not each.arg.startswith("_"):
                yield function.name, each.arg


def test_every_parameter_of_a_door_is_read_or_has_its_reason() -> None:
    unread = {
        f"{path.relative_to(DOORS).as_posix()} {function}"
        for path in sorted(DOORS.rglob("*.py"))
        for function, _ in unread_parameters(path)
        if not function.startswith("_") or function in {"__init__", "__call__", *OVERRIDABLE}
    }
    assert unread == CHANGES_NOTHING.keys()


def test_the_search_sees_a_parameter_that_is_only_deleted(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f(a, b, *, c=1, **d):\n    del b\n    return a\n\ndef g(x):\n    'Hook.'\n")
    assert [*unread_parameters(tmp_path / "a.py")] == [("f", "b"), ("f", "c"), ("f", "d")]
