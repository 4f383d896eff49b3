"""Reads the literal arguments of a Python script for TRL from its syntax tree. The script is not run."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trivium.config import read_yaml
from trivium.config.reading import read_bounded
from trivium.foundation.errors import ConfigError
from trivium.frontdoors.overrides import overridden
from trivium.frontdoors.trl.trainer_keys import OF_ROWS, TRAINERS

_KINDS = {name.replace("_", ""): name for name in (*TRAINERS, *OF_ROWS)}
"""The name of a trainer's class in lower case -> the trainer."""
_PEFT = {"use_peft": True, "lora_r": 8, "lora_alpha": 8}
"""The defaults of LoraConfig, which are not those of TRL's YAML."""
_FORMATS = ("json", "csv", "parquet", "text", "arrow", "imagefolder")
"""The first argument of `load_dataset` that is a format of files, and no dataset."""
_UNREAD = {
    "processing_class": "the tokenizer of the model renders the prompts",
    "ref_model": "the reference is the model that the stage begins with",
    "reward_funcs": "name each function under `rewards`: it returns the reward of one completion",
}
"""Argument of a trainer -> what replaces it."""
_CLASSES = {"args": "", "peft_config": "LoraConfig"}
"""Argument of a trainer -> the class whose arguments are read in its place; empty: that of the trainer's config."""


def read(words: Sequence[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Reads a config in YAML or a script, with the overrides after it, and returns (the config, notes).

    Raises ConfigError for another kind of file, and for a script without one trainer of TRL or without any literal
    argument.
    """
    path = Path(words[0]).expanduser()
    overrides = overridden({}, words[1:])
    if path.suffix in (".yaml", ".yml", ".json"):
        return overridden(read_yaml(path), words[1:]), ()
    if path.suffix != ".py":
        do = "name the Python script that it starts, or the YAML of its --config with trainer=grpo after it"
        raise ConfigError(f"a script or a config of TRL in {path}", f"a file {path.suffix or 'without a suffix'}", do)
    try:
        tree = ast.parse(read_bounded(path), str(path))
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"the script {path}", str(error), "name a Python script") from error
    script = _Script(_assigned(tree))
    calls = [(_name(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    trainer = str(overrides.get("trainer") or _trainer(calls, path)).lower().removesuffix("trainer")
    wanted = trainer.replace("_", "")
    for name, call in calls:
        if name.lower() == f"{wanted}config":
            script.read_call(call, name, "output_dir")
        elif name.lower() == f"{wanted}trainer":
            script.read_trainer(call, name)
        elif name == "LoraConfig":
            # A script that builds a LoraConfig trains an adapter, whatever TRL's own arguments are.
            script.config |= _PEFT
            script.read_call(call, name, "r", "lora_")
    if not script.config and not overrides.keys() - {"trainer"}:
        cause = f"none of {trainer} is a literal: they come from the command line when it runs"
        do = f"give them after the file (model_name_or_path=...), or the YAML of its --config with trainer={trainer}"
        raise ConfigError(f"literal arguments in {path}", cause, do)
    return overridden({"trainer": trainer, **script.config}, words[1:]), tuple(dict.fromkeys(script.notes))


def _trainer(calls: Sequence[tuple[str, ast.Call]], path: Path) -> str:
    """Returns the only trainer that a script builds, else the only one that it configures."""
    for suffix in ("Trainer", "Config"):
        named = {name.removesuffix(suffix).lower() for name, _ in calls if name.endswith(suffix)}
        kinds = sorted(kind for name, kind in _KINDS.items() if name in named)
        if len(kinds) == 1:
            return kinds[0]
        if kinds:
            raise ConfigError(f"one trainer of TRL in {path}", ", ".join(kinds), f"choose one: trainer={kinds[0]}")
    do = "name a script that calls GRPOTrainer, SFTTrainer, DPOTrainer, KTOTrainer or RewardTrainer"
    raise ConfigError(f"a trainer of TRL in {path}", "none that is translated", do)


def _name(function: ast.expr) -> str:
    """Returns the last part of the name of a called function."""
    return getattr(function, "id", getattr(function, "attr", ""))


def _assigned(tree: ast.Module) -> Mapping[str, list[ast.AST]]:
    """Returns what a script binds to each name: the values of assignments, and the node of any other binding."""
    values: dict[str, list[ast.AST]] = defaultdict(list)
    plain: list[ast.AST] = []
    for node in ast.walk(tree):
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name) as target], value=value)
                | ast.AnnAssign(target=ast.Name(id=name) as target, value=ast.expr() as value)
            ):
                # `ast.walk` visits the target itself later, where it would count as a second binding.
                values[name].append(value)
                plain.append(target)
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) if node not in plain:
                values[name].append(node)
            case _:
                pass
    return values


@dataclass
class _Script:
    """What a script states about its trainer."""

    assigned: Mapping[str, list[ast.AST]]
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    """Key of TRL's YAML -> value."""
    notes: list[str] = field(default_factory=list[str])

    def read_call(self, call: ast.Call, name: str, first: str, prefix: str = "") -> None:
        """Reads the arguments of a config class into the keys of the same names, after a prefix."""
        for argument, value in self._arguments(call, name, first):
            self._set(prefix + argument.removeprefix(prefix), value, f"{name}({argument})")

    def read_trainer(self, call: ast.Call, name: str) -> None:
        """Reads the call of a trainer: the model, the rows and the adapter."""
        evaluated: ast.expr | None = None
        for argument, value in self._arguments(call, name, "model"):
            where = f"{name}({argument})"
            if argument == "model":
                loads = self._call_behind(value, "from_pretrained")
                self._set("model_name_or_path", _first(loads, "pretrained_model_name_or_path") or value, where)
                options = ", ".join(str(word.arg) for word in loads.keywords) if loads else ""
                self.notes += [f"from_pretrained: {options}: not read"] if options else []
            elif argument == "train_dataset":
                self._read_dataset(value, where)
            elif argument == "eval_dataset":
                evaluated = value
            elif argument in _UNREAD:
                self.notes.append(f"{where}: {ast.unparse(value):.60} is not read: {_UNREAD[argument]}")
            elif not (argument in _CLASSES and self._call_behind(value, _CLASSES[argument] or f"{name[:-7]}Config")):
                self._computed(where, value)
        if evaluated is not None:
            self._read_evaluated(evaluated, f"{name}(eval_dataset)")

    def _read_evaluated(self, value: ast.expr, where: str) -> None:
        """Reads the split of the rows that evaluations read, if they are another split of the training rows."""
        rows = _Script(self.assigned)
        rows._read_dataset(value, where)
        split = rows.config.pop("dataset_train_split", None)
        is_same = all(self.config.get(key) == rows.config.get(key) for key in ("dataset_name", "dataset_config"))
        if split is not None and is_same and not rows.notes:
            self.config["dataset_test_split"] = split
        else:
            self.notes.append(f"{where}: {ast.unparse(value):.60} is not read: name its rows in `tasks.test`")

    def _read_dataset(self, value: ast.expr, where: str) -> None:
        """Reads the `load_dataset` that the rows come from, and its split. Notes what changes the rows."""
        loads = self._call_behind(value, "load_dataset")
        source = _first(loads, "path")
        if loads is None or source is None or getattr(source, "value", "") in _FORMATS:
            return self._computed(where, loads or value)
        self._set("dataset_name", source, where)
        for argument, part in [("name", part) for part in loads.args[1:2]] + [(w.arg, w.value) for w in loads.keywords]:
            if argument in ("name", "split"):
                key = "dataset_config" if argument == "name" else "dataset_train_split"
                self._set(key, part, f"load_dataset({argument})")
            elif argument != "path":
                self._computed(f"load_dataset({argument})", part)
        for step in self._chain(value):
            if isinstance(step, ast.Subscript):
                # `load_dataset(...)["train"]` selects the split outside the call.
                self._set("dataset_train_split", step.slice, where)
            elif isinstance(step, ast.Call) and step is not loads:
                self.notes.append(f"{where}: {ast.unparse(step):.60} changes the rows, and is not read")
        split, part, _ = str(self.config.get("dataset_train_split", "")).partition("[")
        if part:
            self.config["dataset_train_split"] = split
            self.notes.append(f"{where}: a part of the split {split}: set tasks.train.limit")
        return None

    def _arguments(self, call: ast.Call, name: str, first: str) -> list[tuple[str, ast.expr]]:
        """Returns the named arguments of a call, and its first one under the name `first`. Notes the others."""
        for value in [*call.args[1:], *(word.value for word in call.keywords if word.arg is None)]:
            self._computed(name, value)
        named = [(word.arg, word.value) for word in call.keywords if word.arg is not None]
        return [*((first, value) for value in call.args[:1]), *named]

    def _set(self, key: str, value: ast.AST, where: str) -> None:
        """Sets a key to a literal, or to the literal that a name is bound to, once. Notes a computed value."""
        # A name that is bound twice has no one value that can be read without running the script.
        bound = self.assigned.get(value.id, []) if isinstance(value, ast.Name) else []
        try:
            self.config[key] = ast.literal_eval(bound[0] if len(bound) == 1 else value)  # pyright: ignore[reportArgumentType]
        except (ValueError, TypeError):
            self._computed(where, value)

    def _computed(self, where: str, value: ast.AST) -> None:
        self.notes.append(f"{where}: {ast.unparse(value):.60} is computed by the script, and not read")

    def _call_behind(self, value: ast.expr, function: str) -> ast.Call | None:
        """Returns the call of a function that a value comes from."""
        calls = [node for node in self._chain(value) if isinstance(node, ast.Call)]
        return next((call for call in calls if _name(call.func) == function), None)

    def _chain(self, value: ast.AST) -> list[ast.AST]:
        """Returns a value and what it comes from: the values of a name, the object of a method or an index."""
        chain = [value]
        # The loop also visits what it appends; `not in chain` ends it at `x = f(x)`.
        for node in chain:
            match node:
                case ast.Name(id=name):
                    chain += [bound for bound in self.assigned.get(name, []) if bound not in chain]
                case ast.Subscript(value=inner) | ast.Call(func=ast.Attribute(value=inner)) if inner not in chain:
                    chain.append(inner)
                case _:
                    pass
        return chain


def _first(call: ast.Call | None, name: str) -> ast.expr | None:
    """Returns the first argument of a call, or the one of this name."""
    values = [] if call is None else [*call.args[:1], *(word.value for word in call.keywords if word.arg == name)]
    return next(iter(values), None)
