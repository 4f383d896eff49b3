"""Reads the literal arguments of a Python script for TRL from its syntax tree. The script is not run."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trivium.config import read_yaml
from trivium.config.reading import read_bounded
from trivium.errors import ConfigError
from trivium.frontdoors.overrides import overridden
from trivium.frontdoors.trl.trainer_keys import OF_ROWS, TRAINERS

_CLASS = re.compile(r"(\w+)(Config|Trainer)")
_KINDS = {name.replace("_", ""): name for name in (*TRAINERS, *OF_ROWS)}
"""The name of a trainer's class in lower case -> the trainer."""
_LORA = {"r": "lora_r", "lora_alpha": "lora_alpha"} | {
    name: f"lora_{name}" for name in ("target_modules", "modules_to_save", "target_parameters", "task_type", "bias")
}
"""Argument of LoraConfig -> the key of TRL's YAML, where they differ."""
_PEFT = {"use_peft": True, "lora_r": 8, "lora_alpha": 8}
"""The defaults of LoraConfig, which are not those of TRL's YAML."""
_FORMATS = ("json", "csv", "parquet", "text", "arrow", "imagefolder")
"""The first argument of `load_dataset` that is a format of files, and no dataset."""
_UNREAD = {
    "processing_class": "the tokenizer of the model renders the prompts",
    "ref_model": "the reference is the model that the stage begins with",
    "reward_funcs": "name each function under `rewards`: it returns the reward of one completion",
    "eval_dataset": "name its rows in a second entry of `tasks`, for `evaluation`",
}
"""Argument of a trainer -> what replaces it."""


def read(words: Sequence[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Reads a config in YAML or a script, with the overrides after it, and returns (the config, notes).

    Raises ConfigError for another kind of file, and for a script without one trainer of TRL or without any literal
    argument.
    """
    path = Path(words[0]).expanduser()
    given = overridden({}, words[1:])
    if path.suffix in (".yaml", ".yml", ".json"):
        return overridden(read_yaml(path), words[1:]), ()
    if path.suffix != ".py":
        do = "name the Python script that it starts, or the YAML of its --config with trainer=grpo after it"
        raise ConfigError(f"a script or a config of TRL in {path}", f"a file {path.suffix or 'without a suffix'}", do)
    try:
        tree = ast.parse(read_bounded(path), str(path))
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"the script {path}", str(error), "name a Python script") from error
    script = _Script(path.name, _assigned(tree), _constants(tree))
    calls = [(_name(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    trainer = str(given.get("trainer") or _trainer(calls, path)).lower().removesuffix("trainer")
    for name, call in calls:
        if (match := _CLASS.fullmatch(name)) and match.group(1).lower() == trainer.replace("_", ""):
            script.read_trainer(call, name) if match.group(2) == "Trainer" else script.read_config(call, name)
    if not script.config and not given.keys() - {"trainer"}:
        found = f"none of {trainer} is a literal: they come from the command line when it runs"
        do = f"give them after the file (model_name_or_path=...), or the YAML of its --config with trainer={trainer}"
        raise ConfigError(f"literal arguments in {path}", found, do)
    return overridden({"trainer": trainer, **script.config}, words[1:]), tuple(dict.fromkeys(script.notes))


def _trainer(calls: Sequence[tuple[str, ast.Call]], path: Path) -> str:
    """Returns the only trainer that a script builds, else the only one that it configures."""
    matches = [match for name, _ in calls if (match := _CLASS.fullmatch(name)) and match.group(1).lower() in _KINDS]
    built = {_KINDS[match.group(1).lower()] for match in matches if match.group(2) == "Trainer"}
    kinds = sorted(built or {_KINDS[match.group(1).lower()] for match in matches})
    if len(kinds) == 1:
        return kinds[0]
    do = "name a script with GRPOTrainer, SFTTrainer, DPOTrainer, KTOTrainer or RewardTrainer, or say trainer=grpo"
    raise ConfigError(f"one trainer of TRL in {path}", ", ".join(kinds) or "none that is translated", do)


def _name(function: ast.expr) -> str:
    """Returns the last part of the name of a called function."""
    return (
        function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""
    )


def _assigned(tree: ast.Module) -> Mapping[str, list[ast.expr]]:
    """Returns the values that a script assigns to each name."""
    values: dict[str, list[ast.expr]] = defaultdict(list)
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                values[name].append(value)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                values[name].append(value)
            case _:
                pass
    return values


def _constants(tree: ast.Module) -> frozenset[str]:
    """Returns the names that are bound once in the whole script."""
    bound = Counter(
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
    bound.update(node.arg for node in ast.walk(tree) if isinstance(node, ast.arg))
    return frozenset(name for name, count in bound.items() if count == 1)


@dataclass
class _Script:
    """What a script states about its trainer."""

    file: str
    assigned: Mapping[str, list[ast.expr]]
    constants: frozenset[str]
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    """Key of TRL's YAML -> value."""
    notes: list[str] = field(default_factory=list[str])

    def read_config(self, call: ast.Call, name: str) -> None:
        """Reads the call of a config class."""
        for argument, value in self._arguments(call, name, "output_dir"):
            self._set(argument, value, name, argument)

    def read_trainer(self, call: ast.Call, name: str) -> None:
        """Reads the call of a trainer: the model, the rows and the adapter."""
        for argument, value in self._arguments(call, name, "model"):
            if argument == "model":
                loads = self._call_behind(value, "from_pretrained")
                self._set("model_name_or_path", _first(loads, "model_name") or value, name, argument)
            elif argument == "train_dataset":
                self._read_dataset(value, name)
            elif argument == "peft_config" and (adapter := self._call_behind(value, "LoraConfig")):
                self.config |= _PEFT
                for key, part in self._arguments(adapter, "LoraConfig", "r"):
                    self._set(_LORA.get(key, key), part, "LoraConfig", key)
            elif argument in _UNREAD:
                self.notes.append(f"{name}({argument}={ast.unparse(value):.60}): not read: {_UNREAD[argument]}")
            elif argument != "args" or self._call_behind(value, name.replace("Trainer", "Config")) is None:
                self._computed(name, argument, value)

    def _read_dataset(self, value: ast.expr, name: str) -> None:
        """Reads the `load_dataset` that a value comes from, and its split."""
        loads = self._call_behind(value, "load_dataset")
        source = _first(loads, "path")
        if loads is None or source is None or (isinstance(source, ast.Constant) and source.value in _FORMATS):
            return self._computed(name, "train_dataset", loads or value)
        self._set("dataset_name", source, "load_dataset", "path")
        words = {"name": "dataset_config", "split": "dataset_train_split"}
        values = {word.arg: word.value for word in loads.keywords} | dict(zip(("", "name"), loads.args, strict=False))
        for argument, key in words.items():
            if argument in values:
                self._set(key, values[argument], "load_dataset", argument)
        split = str(self.config.get("dataset_train_split", ""))
        if "[" in split:
            self.config["dataset_train_split"] = split.partition("[")[0]
            self.notes.append(f"load_dataset(split={split!r}): the part is not read: set tasks.train.limit")
        if not isinstance(value, ast.Call) or value is not loads:
            steps = [
                ast.unparse(each) for each in self._chain(value) if each is not loads and isinstance(each, ast.Call)
            ]
            self.notes += [f"{self.file}: {step:.70}: rows are not changed: do it in a file of them" for step in steps]
        return None

    def _arguments(self, call: ast.Call, name: str, first: str) -> list[tuple[str, ast.expr]]:
        """Returns the named arguments of a call, and its first one under the name `first`. Notes the others."""
        named = [(first, value) for value in call.args[:1]]
        for value in [*call.args[1:], *(word.value for word in call.keywords if word.arg is None)]:
            self._computed(name, "*", value)
        return named + [(word.arg, word.value) for word in call.keywords if word.arg is not None]

    def _set(self, key: str, value: ast.expr, call: str, argument: str) -> None:
        """Sets a key to a literal, or to the literal that a name is bound to. Notes a computed value."""
        if isinstance(value, ast.Name) and value.id in self.constants and self.assigned[value.id]:
            value = self.assigned[value.id][0]
        try:
            self.config[key] = ast.literal_eval(value)
        except (ValueError, TypeError):
            self._computed(call, argument, value)

    def _computed(self, call: str, argument: str, value: ast.expr) -> None:
        self.notes.append(f"{call}({argument}={ast.unparse(value):.60}): computed by the script, and not read")

    def _call_behind(self, value: ast.expr, function: str) -> ast.Call | None:
        """Returns the call of a function that a value comes from."""
        return next(
            (each for each in self._chain(value) if isinstance(each, ast.Call) and _name(each.func) == function), None
        )

    def _chain(self, value: ast.expr) -> list[ast.expr]:
        """Returns a value and what it comes from: the values of a name, the object of a method or an index."""
        chain, ahead = list[ast.expr](), [value]
        while ahead:
            each = ahead.pop(0)
            if each in chain:
                continue
            chain.append(each)
            match each:
                case ast.Name(id=name):
                    ahead += self.assigned.get(name, [])
                case ast.Subscript(value=inner) | ast.Call(func=ast.Attribute(value=inner)):
                    ahead.append(inner)
                case _:
                    pass
        return chain


def _first(call: ast.Call | None, name: str) -> ast.expr | None:
    """Returns the first argument of a call, or the one of this name."""
    if call is None:
        return None
    return next(iter([*call.args[:1], *(word.value for word in call.keywords if word.arg == name)]), None)
