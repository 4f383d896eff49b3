"""Reads a config of Trinity-RFT's shape: its values, the sections in its lists, and its problems."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

from trivium.config import merged, read_yaml
from trivium.foundation.errors import Problem, TriviumError
from trivium.frontdoors.plain_values import plain, resolved, unescaped
from trivium.frontdoors.tables import KEEP_ALL, KeyTable, Settings
from trivium.frontdoors.trinity.config.config_table import AUXILIARY_MODEL, LORA, TABLE, TRAINER_CONFIG
from trivium.frontdoors.trinity.config.keys_of_data import EXPERIENCE_BUFFER, TASKSET
from trivium.frontdoors.trinity.config.registries import PLUGIN_DIRS, path_of

_NOT_SAMPLED = ("sft", "dpo")
_FIRST_PORT = 8001
"""The port of the first auxiliary model, unless its `base_port` is set."""


class TrinityConfig:
    """The values of a config by dotted key, and the problems found so far."""

    def __init__(self, config: object) -> None:
        """`config` is a mapping, an OmegaConf container, or an object with attributes; values may nest."""
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        value = resolved(plain(config))
        self.plain: dict[str, Any] = value if isinstance(value, dict) else {}
        self._top = self._read(TABLE, _without_own_arguments(self.plain) if self.plain else value, "")
        path = self["trainer.trainer_config_path"]
        trainer = self["trainer.trainer_config"] or (self._file(path) if path else {})
        self.trainer = self._read(TRAINER_CONFIG, trainer, "trainer.trainer_config")
        """The values of trainer.trainer_config."""
        explorer_input, one = "buffer.explorer_input", self["buffer.explorer_input.taskset"]
        several = self[f"{explorer_input}.tasksets"]
        tasksets = self._read_items(TASKSET, several, f"{explorer_input}.tasksets")
        tasksets += [self._read(TASKSET, one, f"{explorer_input}.taskset")] if one else []
        self.tasksets = [taskset for taskset in tasksets if _has_path(taskset)]
        evaluated = self._read_items(
            TASKSET, self[f"{explorer_input}.eval_tasksets"], f"{explorer_input}.eval_tasksets"
        )
        self.eval_tasksets = [taskset for taskset in evaluated if _has_path(taskset)]
        if one and several and _has_path(tasksets[-1]):
            self.problem(f"{explorer_input}.taskset", "one taskset", "tasksets lists others", "set one of the two keys")
        experiences = self["buffer.trainer_input.experience_buffer"] or {}
        self.experiences = self._read(EXPERIENCE_BUFFER, experiences, "buffer.trainer_input.experience_buffer")
        loras = self._read_items(LORA, self["model.lora_configs"], "model.lora_configs")
        if len(loras) > 1:
            self.problem("model.lora_configs", f"{len(loras)} adapters", "one is trained", "name one")
        self.lora = loras[0] if loras else None
        self.auxiliary_models = self._read_items(
            AUXILIARY_MODEL, self["explorer.auxiliary_models"], "explorer.auxiliary_models"
        )

    def __getitem__(self, key: str) -> Any:
        """Returns the value of a key of the table, or Trinity-RFT's default if it is unset."""
        return self._top[key]

    def has(self, key: str) -> bool:
        """Whether the key has a value."""
        return self._top.has(key)

    def section(self, prefix: str) -> dict[str, Any]:
        """Returns the keys below `prefix` that are set."""
        node: Any = self.plain
        for name in prefix.split("."):
            node = node.get(name) if isinstance(node, Mapping) else None
        return unescaped(dict(node)) if isinstance(node, Mapping) else {}

    def text(self, key: str) -> str:
        """Returns the text of a key; empty if it is unset."""
        return str(self[key] or "")

    def mapped(self) -> dict[str, Any]:
        """Returns the RunConfig fragment of the rows of the tables that have a path."""
        context = {"mode": self.mode, "learning from rows": self.offline}
        tables = [self.trainer, *([self.lora] if self.lora else []), self._top]
        return reduce(merged, (table.mapped(**context) for table in tables), {"checkpoint": {"keep": KEEP_ALL}})

    def first(self, *keys: str) -> Any:
        """Returns the value of the first of these keys that is set, else the first default."""
        return self._top.first(*keys)

    def problem(self, where: str, wanted: str, cause: str, do: str) -> None:
        """Notes a problem. All problems are reported at once."""
        self.problems.append(Problem(where, wanted, cause, do))

    def is_wrong(self, key: str) -> bool:
        """Whether a problem of this key is known."""
        return any(problem.where == key for problem in self.problems)

    def is_plugin(self, name: str, names: Sequence[str]) -> bool:
        """Whether a module of the user registers a name: the modules are named, or it does not look like a misspelling
        of a known name."""
        words = name.split("_")
        # A known name with further words is a variant of the user's, not a misspelling.
        adds_words = any(set(other.split("_")) < set(words) for other in names)
        alike = difflib.get_close_matches(name, names, n=1, cutoff=0.9)
        alike += difflib.get_close_matches(_core(name), {_core(other) for other in names}, n=1, cutoff=0.75)
        return bool(os.environ.get(PLUGIN_DIRS)) or adds_words or not alike

    def endpoints(self) -> list[dict[str, Any]]:
        """Returns `model` and `urls` of each auxiliary model, which the user serves behind endpoints."""
        served: list[dict[str, Any]] = []
        for number, model in enumerate(self.auxiliary_models):
            path, port = str(model["model_path"]), model["base_port"] or _FIRST_PORT + number
            served.append({"model": path, "urls": [f"http://127.0.0.1:{port}/v1"]})
            self.note(
                f"explorer.auxiliary_models[{number}]: {path} is asked at http://127.0.0.1:{port}/v1: start it before "
                f"the run, with `vllm serve {path} --port {port}` for example"
            )
        return served

    def note(self, text: str) -> None:
        """Adds a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    def all_notes(self) -> Iterator[str]:
        """Yields notes on keys that have no effect and on work left to the user."""
        yield from self.notes
        yield from self._top.notes()

    def buffer_of(self, key: str, value: object) -> Settings:
        """Returns another section with the keys of the experience buffer."""
        return self._read(EXPERIENCE_BUFFER, value, key)

    def stage_configs(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields (name, whole config) of each stage: the stage's sections replace those of the config."""
        whole = {key: value for key, value in self.plain.items() if key != "stages"}
        for number, stage in enumerate(self["stages"]):
            if not isinstance(stage, Mapping):
                self.problem(f"stages[{number}]", repr(stage), "not a section", "write stage_name, algorithm, ...")
                continue
            # The sections of a stage replace those of the config; Trinity does not merge them either.
            sections = {str(key): value for key, value in stage.items() if value is not None}
            yield str(sections.pop("stage_name", number)), {**whole, **sections}

    def warmup_config(self, steps: int) -> dict[str, Any]:
        """Returns the config of the supervised steps that begin a run in 0.2."""
        buffer = self.plain.get("buffer", {})
        experiences = {**(self["buffer.trainer_input.sft_warmup_dataset"] or {}), "storage_type": "file"}
        size = self["buffer.train_batch_size"] or self["buffer.batch_size"] * self["algorithm.repeat_times"]
        return {
            **self.plain,
            "mode": "train",
            "algorithm": {"algorithm_type": "sft", "optimizer": self.plain.get("algorithm", {}).get("optimizer", {})},
            "buffer": {
                **buffer,
                "train_batch_size": size,
                "total_steps": steps,
                "trainer_input": {"experience_buffer": experiences},
            },
        }

    def without_warmup(self) -> dict[str, Any]:
        """Returns the config without its supervised steps."""
        buffer = self.plain["buffer"]
        trainer_input = {**buffer["trainer_input"], "sft_warmup_steps": 0}
        return {**self.plain, "buffer": {**buffer, "trainer_input": trainer_input}}

    def _read(self, table: KeyTable, value: object, where: str) -> Settings:
        settings = table.read(value)
        prefix = f"{where}." if where else ""
        self.problems += [Problem(prefix + p.where, p.asked, p.found, p.do) for p in settings.problems]
        self.notes += [f"{prefix}{note}" for note in settings.notes()] if where else []
        return settings

    def _read_items(self, table: KeyTable, values: Any, where: str) -> list[Settings]:
        return [self._read(table, value, f"{where}[{number}]") for number, value in enumerate(values or ())]

    def _file(self, path: str) -> dict[str, Any]:
        try:
            return read_yaml(Path(path))
        except TriviumError as error:
            self.problem("trainer.trainer_config_path", path, error.found, "correct the path, or leave it out")
            return {}

    # ------------------------------------------------------------------ shared by several sections

    @cached_property
    def algorithm_type(self) -> str:
        """The algorithm_type in lower case."""
        return str(self["algorithm.algorithm_type"]).lower()

    @cached_property
    def offline(self) -> bool:
        """Whether the config learns from rows, without generating rollouts."""
        return self.algorithm_type in _NOT_SAMPLED or (self.algorithm_type == "cpt" and self.experiences.has("path"))

    @cached_property
    def mode(self) -> str:
        """The run.mode."""
        mode = str(self["mode"]).lower()
        modes = ("both", "explore", "train", "bench", "serve")
        if mode not in (*modes, "colocate"):
            self.problem("mode", repr(mode), "no such mode", f"use one of {', '.join(modes)}")
        # `colocate` is `both` on one GPU, which the engines and the trainer share in any case.
        return "both" if mode not in modes else mode

    @cached_property
    def batches(self) -> Batches:
        """The sizes of a step."""
        return _batches(self)

    @property
    def sync_interval(self) -> int:
        """Train steps between two publications."""
        return self.first("synchronizer.trainer_sync_interval", "synchronizer.sync_interval")

    @property
    def max_staleness(self) -> int:
        """The largest age of a group in versions, from the explorers' steps between two synchronisations."""
        least = self.sync_interval - 1
        if str(self["synchronizer.sync_style"]).lower() == "fully_async":
            return least + self["explorer.max_inflight_batches"]
        explored = self.first("synchronizer.explorer_sync_interval", "synchronizer.sync_interval")
        ahead = (explored + self["synchronizer.sync_offset"]) * self.batches.explored
        return max(least, math.ceil(ahead / self.batches.fresh) - 1)

    @property
    def run_dir(self) -> str:
        """The run directory."""
        parts = [self.text(key) for key in ("checkpoint_root_dir", "project", "group", "name")]
        return os.path.expanduser(os.path.join(*parts))

    @property
    def run_name(self) -> str:
        """The name of the run for commands that share a buffer."""
        parts = [self.text(key) for key in ("project", "group", "name")]
        return self.text("ray_namespace") or "/".join(part for part in parts if part)


def _without_own_arguments(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config without the arguments of a monitor of the user, which may have any names."""
    monitor = config.get("monitor")
    if not isinstance(monitor, dict) or path_of(str(monitor.get("monitor_type") or "")) is None:
        return config
    return {**config, "monitor": {name: value for name, value in monitor.items() if name != "monitor_args"}}


def _has_path(taskset: Settings) -> bool:
    """Whether a taskset names its rows. A path that leads to no value is a problem of its own."""
    return taskset.has("path") or any(problem.where == "path" for problem in taskset.problems)


def _core(name: str) -> str:
    """Returns a name without the ending that all names of its kind have."""
    return name.removesuffix("_workflow").removesuffix("_reward")


@dataclass(frozen=True)
class Batches:
    """The sizes of a step. Trinity-RFT counts experiences: a group is `group_size` of them, an expert's group is
    one."""

    group_size: int
    fresh: int
    """Groups of a train step that explorers generate."""
    expert: int
    """Groups of a train step that an expert wrote."""
    explored: int
    """Tasks of an explorer's step."""


def _batches(trinity: TrinityConfig) -> Batches:
    size = 1 if trinity.offline else max(1, trinity["algorithm.repeat_times"])
    tasks, experiences = max(1, trinity["buffer.batch_size"]), trinity["buffer.train_batch_size"]
    if trinity.offline or trinity.mode == "train":
        if not experiences and trinity.mode != "bench":
            do = "set buffer.train_batch_size, in experiences"
            trinity.problem("buffer.train_batch_size", "the experiences of a step", "nothing", do)
        experiences = experiences or tasks * size
        tasks = trinity["buffer.batch_size"] if trinity.has("buffer.batch_size") and not trinity.offline else 0
    if trinity.offline:
        size = 2 if trinity.algorithm_type == "dpo" else 1
        return Batches(size, experiences, 0, experiences)
    expert = 0
    if mixes(trinity):
        whole = experiences or tasks * size
        ratio = trinity["algorithm.sample_strategy_args"].get("expert_data_ratio", 0.5)
        # 0.1 * 30 is 3.0000000000000004 in binary, whose ceiling is 4.
        expert = math.ceil(round(float(ratio) * whole, 9))
        experiences = whole
    fresh, rest = divmod((experiences or tasks * size) - expert, size)
    if rest or not fresh:
        trinity.problem(
            "buffer.train_batch_size",
            f"{experiences} experiences" + (f", of which an expert wrote {expert}" if expert else ""),
            f"the others are not whole groups of {size} (algorithm.repeat_times)",
            f"leave {size}, {2 * size}, {3 * size}, ... for what explorers generate",
        )
    return Batches(size, max(1, fresh), expert, tasks or max(1, fresh))


def mixes(trinity: TrinityConfig) -> bool:
    """Whether a step has completions of an expert beside those of the policy."""
    by_type = trinity.algorithm_type in ("mix", "mix_chord")
    return (trinity.text("algorithm.sample_strategy") or ("mix" if by_type else "default")) == "mix"
