"""The `buffer`, `data_processor` and evaluation keys of Trinity-RFT's config, translated to tasks, workflow, rewards
and buffer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trivium.config import build
from trivium.config.schema import plugin
from trivium.foundation.errors import TriviumError
from trivium.foundation.registry import resolve, suggest
from trivium.frontdoors.tables import Settings, numbers_of_samples
from trivium.frontdoors.trinity.config.named_workflows import INPUT, Judged, judged, judged_in_training
from trivium.frontdoors.trinity.config.registries import path_of
from trivium.frontdoors.trinity.config.trinity_config import TrinityConfig, mixes

_BUFFER = "buffer.trainer_input.experience_buffer"
_DATABASES = ("sqlite", "postgresql", "mysql")
_SOURCES = "trivium.frontdoors.trinity.tasksets"
EVALUATED = "eval"
"""The name of the evaluation taskset."""


def tasks_of(trinity: TrinityConfig) -> dict[str, Any]:
    """Returns the `tasks` section."""
    if trinity.offline:
        _piped(trinity)
        return {"train": _rows(trinity, trinity.experiences, _BUFFER)}
    tasks: dict[str, Any] = {}
    if trinity.tasksets:
        tasks["train"] = _merged(trinity, trinity.tasksets, f"{INPUT}.taskset")
    elif trinity.mode in ("serve", "train"):
        tasks["train"] = {"kind": "served"}
    elif trinity.mode == "bench" and trinity.eval_tasksets:
        tasks["train"] = _merged(trinity, trinity.eval_tasksets, f"{INPUT}.eval_tasksets")
    else:
        trinity.problem(f"{INPUT}.taskset", "tasks", "no taskset has a path", "name one: taskset: {path: ...}")
    _piped(trinity)
    if trinity.eval_tasksets and trinity.mode != "serve":
        label = EVALUATED if _judged_in_evaluation(trinity) is not None else ""
        tasks[EVALUATED] = _merged(trinity, trinity.eval_tasksets, f"{INPUT}.eval_tasksets", label)
    if mixes(trinity):
        name, expert = _expert(trinity)
        tasks[name] = _rows(trinity, expert, f"buffer.trainer_input.auxiliary_buffers.{name}")
    return tasks


def _piped(trinity: TrinityConfig) -> None:
    """Accepts a task pipeline whose output the run reads: its inputs are named, and the rows are others."""
    where = "data_processor.task_pipeline"
    pipeline = trinity[where] or {}
    if not pipeline.get("operators"):
        return
    inputs = [entry.get("path") if isinstance(entry, Mapping) else entry for entry in pipeline.get("inputs") or ()]
    sources = [trinity.experiences] if trinity.offline else trinity.tasksets
    if inputs and sources and not {str(settings["path"]) for settings in sources} & set(map(str, inputs)):
        path = ", ".join(str(settings["path"]) for settings in sources)
        trinity.note(f"{where}: run it with Data-Juicer before the run, which reads the rows that it writes to {path}")
        return
    do = "run it before, and let taskset.path name the rows that it writes"
    trinity.problem(where, "Data-Juicer's task pipeline", "the run reads no rows that it writes", do)


def num_rows(source: Mapping[str, Any]) -> int | None:
    """Returns the number of rows of a task source; None if the rows are not on this machine."""
    if source.get("kind") == "served":
        return None
    try:
        config: Any = plugin("tasks")(dict(source))
        return len(build("tasks", config, name="train", seed=0))
    except (TriviumError, ValueError):
        return None


# --------------------------------------------------------------------------- sources of rows


def _source(trinity: TrinityConfig, settings: Settings, where: str) -> dict[str, Any]:
    """Returns kind and path of a task source: a file, else a folder or a Hugging Face id."""
    path, subset = str(settings["path"]), settings["subset_name"]
    here = Path(path).expanduser()
    path = str(here.resolve()) if here.exists() else path
    if path.endswith((".jsonl", ".parquet")):
        return {"kind": "jsonl" if path.endswith(".jsonl") else "parquet", "path": path}
    source = {"kind": "datasets", "path": path, "split": settings["split"]}
    if subset and here.is_dir() and not (here / "README.md").is_file():  # which lists the files
        trinity.notes.append(f"{where}.subset_name: no effect: the folder {path} has no configurations")
        subset = None
    return source | ({"subset": subset} if subset else {})


def _taskset(trinity: TrinityConfig, settings: Settings, where: str) -> dict[str, Any]:
    """Returns the task source of a taskset."""
    if str(settings["storage_type"]).lower() != "file":
        do = "write the tasks into a file: storage_type: file"
        trinity.problem(f"{where}.storage_type", repr(settings["storage_type"]), "tasks are read from files", do)
    source = {**_source(trinity, settings, where), "prompt": settings["format.prompt_key"], **_images(settings)}
    judge = judged(trinity, settings, where)
    key = settings["format.response_key"]
    # Task sources read `reward_model.ground_truth` without being told.
    if (settings.has("format.response_key") or judge.reads_answer) and key != "reward_model.ground_truth":
        source["answer"] = key
    system = settings["format.system_prompt"] or trinity[f"{INPUT}.system_prompt"] or judge.system
    source |= {"system": system} if system else {}
    if judge.needs_prompt:
        return source
    return {"kind": "python", "source": f"{_SOURCES}:rows_of_workflow", "args": {"tasks": source}}


def _images(settings: Settings) -> dict[str, Any]:
    return {"images": settings["format.image_key"]} if settings.has("format.image_key") else {}


def _merged(trinity: TrinityConfig, tasksets: list[Settings], where: str, label: str = "") -> dict[str, Any]:
    """Merges several tasksets into one task source. All of them must have the same workflow and rewards. With `label`,
    the column `data_source` of each task begins with it."""
    sources = [_taskset(trinity, taskset, where) for taskset in tasksets]
    judges = {repr(judged(trinity, taskset, where)) for taskset in tasksets}
    if len(judges) > 1:
        do = "give all of them one default_workflow_type and default_reward_fn_type, or run them one after the other"
        trinity.problem(where, f"{len(judges)} ways to judge", "one workflow and its rewards hold for every task", do)
    if len(sources) == 1 and not label:
        return sources[0]
    named = zip(_names(tasksets, label), sources, strict=True)
    args = {"tasksets": [{"name": name, **source} for name, source in named]}
    return {"kind": "python", "source": f"{_SOURCES}:tasks_of_all", "args": args}


def _names(tasksets: list[Settings], label: str = "") -> list[str]:
    """Returns a name for each taskset, with `label` before it."""
    names = [str(taskset["name"] or f"taskset_{number}") for number, taskset in enumerate(tasksets)]
    return [f"{label}/{name}" for name in names] if label else names


def _rows(trinity: TrinityConfig, settings: Settings, where: str) -> dict[str, Any]:
    """Returns the task source of rows with an expert's text, or with pairs."""
    kind = str(settings["storage_type"]).lower()
    if not settings.has("path") or kind != "file":
        if trinity.is_wrong(f"{where}.path"):
            return {"kind": "jsonl", "path": "rows.jsonl"}
        cause = f"storage_type {kind}, path {settings['path']!r}"
        trinity.problem(where, "rows to learn from", cause, "name a file: storage_type: file, path: ...")
        return {"kind": "jsonl", "path": "rows.jsonl"}
    source, prompt_type = _source(trinity, settings, where), str(settings["format.prompt_type"]).lower()
    source |= _images(settings)
    system = {"system": settings["format.system_prompt"]} if settings.has("format.system_prompt") else {}
    if trinity.algorithm_type == "cpt":
        source["prompt"] = settings["format.prompt_key"]
        return {"kind": "python", "source": f"{_SOURCES}:texts", "args": {"tasks": source}}
    if trinity.algorithm_type == "dpo":
        key = "format.messages_key" if prompt_type == "messages" else "format.prompt_key"
        return {**source, "prompt": settings[key], **system}
    # The last message of the conversation is the completion.
    if prompt_type == "messages":
        return {**source, "prompt": settings["format.messages_key"], "completion": settings["format.messages_key"]}
    columns = {"prompt": settings["format.prompt_key"], "completion": settings["format.response_key"]}
    return {**source, **columns, **system}


def _expert(trinity: TrinityConfig) -> tuple[str, Settings]:
    """Returns (name, section) of the auxiliary buffer with the expert's rows."""
    where, buffers = "buffer.trainer_input.auxiliary_buffers", trinity["buffer.trainer_input.auxiliary_buffers"]
    name = str(trinity["algorithm.sample_strategy_args"].get("sft_dataset_name", "sft_dataset"))
    old = trinity["buffer.trainer_input.sft_warmup_dataset"]
    if name not in buffers and not old:
        trinity.problem(where, f"the expert's rows, {name!r}", "no such buffer", suggest(name, buffers))
    return name, trinity.buffer_of(f"{where}.{name}", buffers.get(name, old or {"storage_type": "file", "path": name}))


# --------------------------------------------------------------------------- the buffer


def buffer_of(trinity: TrinityConfig) -> dict[str, Any]:
    """Returns the `buffer` section."""
    settings = trinity.experiences
    if trinity.offline:
        pair = {name: settings[f"format.{name}_key"] for name in ("chosen", "rejected")}
        return {"kind": "files", **(pair if trinity.algorithm_type == "dpo" else {})}
    kind, path = str(settings["storage_type"]).lower(), str(settings["path"] or "")
    if kind not in ("queue", "sql", "file"):
        trinity.problem(f"{_BUFFER}.storage_type", repr(kind), "no such storage", "use queue, sql or file")
    if kind == "file" and trinity.mode in ("train", "explore"):
        do = "use storage_type queue or sql"
        trinity.problem(f"{_BUFFER}.storage_type", "file", f"mode {trinity.mode!r} exchanges groups", do)
    shared = trinity.mode in ("explore", "train", "serve") or kind == "sql"
    section: dict[str, Any] = {"kind": "sql", "url": _url(trinity, path)} if shared else {"kind": "memory"}
    return section | _strategy(trinity) | _operators(trinity)


def _url(trinity: TrinityConfig, path: str) -> str:
    """Returns the URL of a buffer's database: the configured one, else one in the run directory."""
    if path.partition(":")[0].partition("+")[0] not in _DATABASES:
        return f"sqlite:///{(Path(trinity.run_dir) / 'buffer.db').resolve()}"
    if path.startswith("mysql"):
        do = "use sqlite:///file.db or postgresql://user@host/name"
        trinity.problem(f"{_BUFFER}.path", path, "MySQL is not supported", do)
    # Explorers and trainer may start in different folders, and must find one file.
    file = path.removeprefix("sqlite:///")
    return f"sqlite:///{Path(file).expanduser().resolve()}" if file != path else path


def _strategy(trinity: TrinityConfig) -> dict[str, Any]:
    """Translates buffer.strategy, which selects the groups of a train step."""
    args, batches = trinity["algorithm.sample_strategy_args"], trinity.batches
    if mixes(trinity):
        name, _ = _expert(trinity)
        whole = batches.fresh + batches.expert
        return {"strategy": {"kind": "mix", "taskset": name, "expert_data_ratio": batches.expert / whole}}
    name = trinity.text("algorithm.sample_strategy") or "default"
    if (path := path_of(name)) is not None:
        return _own_strategy(trinity, path)
    if name not in ("default", "warmup", "staleness_control"):
        do = suggest(name, ("default", "staleness_control", "mix")) + "; a class of yours is buffer.strategy"
        trinity.problem("algorithm.sample_strategy", repr(name), "no such strategy", do)
    bound = args.get("max_staleness", math.inf)
    if name == "staleness_control" and bound < trinity.max_staleness:  # without them, no group is older
        return {"strategy": {"kind": "staleness_control", "max_staleness": int(bound)}}
    return _replay(trinity)


def _own_strategy(trinity: TrinityConfig, path: str) -> dict[str, Any]:
    """Translates a strategy of the user. One of Trinity-RFT's form reads experiences, and the Trainer calls it."""
    try:
        target = resolve("sample_strategies", path)
    except (TriviumError, ImportError) as error:
        do = "correct the path; write trivium.frontdoors.trinity for trinity in its imports"
        trinity.problem("algorithm.sample_strategy", path, f"{type(error).__name__}: {error}", do)
        return {}
    if not callable(getattr(target, "state_dict", None)):
        return {"strategy": {"kind": path, **trinity["algorithm.sample_strategy_args"]}}
    trinity.note("algorithm.sample_strategy: a Trainer calls it; `trivium run` does not")
    return {}


_PRIORITIES = ("linear_decay", "decay_limit_randomization")


def _replay(trinity: TrinityConfig) -> dict[str, Any]:
    settings, new = trinity.experiences, "replay_buffer."
    old = settings["use_priority_queue"]
    # Versions before 0.4 have the keys without the section.
    cooldown = settings["reuse_cooldown_time" if old else f"{new}reuse_cooldown_time"]
    if not (old or settings[f"{new}enable"]) or cooldown is None:
        return {}
    args = dict(settings["replay_buffer_kwargs" if old else f"{new}priority_fn_args"])
    priority = args.pop("priority_fn", settings[f"{new}priority_fn"])
    where = f"{_BUFFER}.{'replay_buffer_kwargs' if old else 'replay_buffer.priority_fn'}"
    if priority not in _PRIORITIES:
        trinity.problem(where, repr(priority), "no such priority", suggest(str(priority), _PRIORITIES))
    for name in set(args) - {"decay", "sigma", "use_count_limit"}:
        trinity.problem(f"{where}.{name}", repr(args[name]), "no such option", "use decay, sigma, use_count_limit")
    if priority == "linear_decay":
        args = {name: value for name, value in args.items() if name == "decay"}
    return {"strategy": {"kind": "replay", "priority": priority, **args}}


_OPERATORS: Mapping[str, tuple[str, ...]] = {
    "reward_filter": ("threshold",),
    "reward_std_filter": ("threshold",),
    "dapo_dynamic_sampling": ("metric_key", "correct_threshold"),
    "reward_shaping_mapper": ("reward_shaping_configs",),
    "mask_response_truncated": (),
    "pass_rate_calculator": (),
    "invalid_reward_filter": (),
}
"""Operators by name -> their arguments. The last three are defaults in Trivium, or done elsewhere."""


def _operators(trinity: TrinityConfig) -> dict[str, Any]:
    """Translates buffer.operators, which process each finished group."""
    where, operators = "data_processor.experience_pipeline", list[dict[str, Any]]()
    for number, operator in enumerate(trinity[f"{where}.operators"]):
        name, args = operator.get("name", ""), operator.get("args") or {}
        place = f"{where}.operators[{number}]"
        if (path := path_of(name)) is not None:
            operators.append({"kind": path, **args})
        elif name not in _OPERATORS:
            missing = "Data-Juicer's service is not supported" if name == "data_juicer" else "no such operator"
            trinity.problem(place, repr(name), missing, suggest(name, _OPERATORS) + "; or file.py:Name")
        elif unknown := set(args) - set(_OPERATORS[name]):
            trinity.problem(f"{place}.args", ", ".join(unknown), "no such argument", suggest("", _OPERATORS[name]))
        elif name in ("reward_filter", "reward_std_filter"):
            operators.append({"kind": name, **args})
        elif name == "dapo_dynamic_sampling":
            # DAPO's sampling leaves out groups whose rewards are all equal.
            operators.append({"kind": "reward_std_filter", "component": args.get("metric_key", "accuracy")})
        elif name == "reward_shaping_mapper":
            operators += map(_shaped, args.get("reward_shaping_configs", ()))
        elif name == "pass_rate_calculator":
            operators.append({"kind": "metrics", "numbers": ["pass_rate"]})
    operators += map(_shaped, trinity[f"{where}.reward_shaping"])
    return {"operators": operators} if operators else {}


def _shaped(config: Mapping[str, Any]) -> dict[str, Any]:
    op = str(config.get("op_type", "add")).lower()
    return {
        "kind": "reward_shaping",
        "metric": config.get("stats_key", ""),
        "op": op,
        "weight": config.get("weight", 1.0),
        "missing": "skip",
    }


# --------------------------------------------------------------------------- workflow, rewards, evaluation


def workflow_of(trinity: TrinityConfig) -> dict[str, Any]:
    """Returns the sections `workflow` and `rewards`."""
    judge, other = judged_in_training(trinity), _judged_in_evaluation(trinity)
    rewards = [*judge.rewards] if other is None else [_by_taskset(trinity, judge.rewards, other.rewards)]
    return {"workflow": dict(judge.workflow), **({"rewards": rewards} if rewards else {})}


def _judged_in_evaluation(trinity: TrinityConfig) -> Judged | None:
    """Returns the workflow and rewards of evaluation if its rewards are not those of training. Notes a problem for
    another workflow or penalty."""
    where = f"{INPUT}.eval_tasksets"
    if not trinity.tasksets or not trinity.eval_tasksets or trinity.offline:
        return None
    judge, other = judged_in_training(trinity), judged(trinity, trinity.eval_tasksets[0], where)
    if other.shaping not in ((), judge.shaping):
        do = "set reward_fn_args of training in eval_tasksets as well, or leave them out there"
        trinity.problem(where, "another penalty than in training", "evaluation judges as training", do)
    if other.rewards == judge.rewards and _flow(other) == _flow(judge):
        return None
    if _flow(other) != _flow(judge) or not (judge.rewards and other.rewards):
        do = "name the workflow of training there, or evaluate the checkpoints with a config that trains nothing"
        trinity.problem(where, "another workflow than in training", "a run has one workflow", do)
        return None
    return other


def _by_taskset(
    trinity: TrinityConfig, training: Sequence[Mapping[str, Any]], evaluation: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Returns the reward that judges the tasks of evaluation by rewards of their own."""

    def named(rewards: Sequence[Mapping[str, Any]], prefix: str = "") -> dict[str, dict[str, Any]]:
        names = [prefix + str(reward.get("name") or f"reward_{number}") for number, reward in enumerate(rewards)]
        return {name: {**reward, "name": name} for name, reward in zip(names, rewards, strict=True)}

    trains, evaluates = named(training), named(evaluation, f"{EVALUATED}_")
    labels = dict.fromkeys(_names(trinity.eval_tasksets, EVALUATED), dict.fromkeys(evaluates, 1.0))
    return {
        "kind": "recipe",
        "column": "data_source",
        "components": [*trains.values(), *evaluates.values()],
        "labels": {"train": dict.fromkeys(trains, 1.0), **labels},
        "default": "train",
    }


def _flow(judge: Judged) -> dict[str, Any]:
    """Returns the workflow without the sampling parameters, which evaluation has of its own."""
    return {name: value for name, value in judge.workflow.items() if name != "rollout_args"}


def sampling_of(trinity: TrinityConfig, settings: Settings | None) -> dict[str, Any]:
    """Returns the sampling settings of a taskset."""
    model = "explorer.rollout_model"
    names = ("temperature", "top_p", "top_k", "max_tokens")
    rollout_args = {name: settings[f"rollout_args.{name}"] for name in names} if settings else {}
    sampling: dict[str, Any] = {"max_new_tokens": rollout_args.pop("max_tokens", None) or _max_tokens(trinity)[1]}
    for name in ("temperature", "top_p", "top_k"):
        value = rollout_args.get(name)
        if value is None or (name == "top_k" and value == -1):
            value = trinity.first(f"{model}.{name}", f"model.{name}")
        sampling[name] = max(0, value) if name == "top_k" else value
    least = trinity.first(f"{model}.min_response_tokens", "model.min_response_tokens")
    return sampling | ({"min_new_tokens": least} if least else {})


def _max_tokens(trinity: TrinityConfig) -> tuple[int, int]:
    """Returns (most tokens of prompt and completion together, most tokens of the completion). An unset value follows
    from the other."""
    values = [
        trinity.first(f"explorer.rollout_model.{name}", f"model.{name}")
        for name in ("max_model_len", "max_prompt_tokens", "max_response_tokens")
    ]
    whole, prompt, response = values
    if whole is None and (prompt is None or response is None):
        do = "set model.max_model_len, or max_prompt_tokens and max_response_tokens"
        if trinity.offline:
            return 0, 0
        trinity.problem("model.max_model_len", "the longest sequence", "nothing says it", do)
        return 2048, 1024
    whole = prompt + response if whole is None else whole
    if prompt is not None and response is not None and prompt + response > whole:
        cause = f"{prompt} + {response} is more than max_model_len {whole}"
        trinity.problem("model.max_prompt_tokens", "room for prompt and completion", cause, "correct one of them")
    if response is None:
        # Trinity gives half to each, if neither of the two is set.
        response = whole // 2 + whole % 2 if prompt is None else whole - min(prompt, whole - 1)
    return whole, min(response, whole - 1) if prompt is None else response


def max_context(trinity: TrinityConfig) -> int:
    """Returns the longest sequence in tokens; 0 if the config does not set it."""
    return _max_tokens(trinity)[0]


def evaluation_of(trinity: TrinityConfig, interval: int) -> dict[str, Any] | None:
    """Returns the `evaluation` section; None if there is nothing to evaluate."""
    if not trinity.eval_tasksets or trinity.offline or trinity.mode == "serve":
        return None
    where, tasksets = f"{INPUT}.eval_tasksets", trinity.eval_tasksets
    samples = [max(1, taskset["repeat_times"]) for taskset in tasksets]
    sampled = [sampling_of(trinity, taskset) for taskset in tasksets]
    for values, name, used in ((samples, "repeat_times", "the largest"), (sampled, "rollout_args", "the first")):
        if any(value != values[0] for value in values):
            trinity.note(f"{where}.{name}: the tasksets are evaluated as one, with {used} of several values")
    if trinity.mode == "explore":
        trinity.notes.append(
            f"{where}: evaluated when the trainer says so: its file names the same, and the same explorer.eval_interval"
        )
    number, every = max(samples), trinity["explorer.eval_interval"]
    return {
        "taskset": EVALUATED,
        # Trinity rounds down to the versions that explorers get, too.
        "every": every if every % interval == 0 else max(every // interval, 1) * interval,
        "samples": number,
        "k": numbers_of_samples(number),
        "sampling": sampled[0],
    }
