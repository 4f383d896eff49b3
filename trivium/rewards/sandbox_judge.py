"""Evaluates an `assert` in one process while the functions that it calls run in another one: `judge` and `serve`.

The text of this file runs in both, inside the sandbox (`sandbox_main.py`), with nothing but the standard library. Plain
data crosses by value; of every other object the program keeps the object and the judge has a `Remote`. What the program
sends can only become such values: whether the statement holds is decided by the judge's own interpreter. The program
sees the arguments of the calls, never what their results are compared with.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import math
import operator
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

_COLLECTIONS: dict[str, Callable[[Iterable[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}
_TEXTS: dict[str, Callable[[str], Any]] = {
    "bytes": bytes.fromhex,
    "complex": complex,
    "Fraction": Fraction,
    "Decimal": Decimal,
}
_PREDICATES = {
    name
    for kind in (str, bytes, bytearray, int, float, list, tuple, dict, set, frozenset)
    for name in dir(kind)
    if name.startswith("is") or name.endswith("with")
}
"""Methods of plain data that answer yes or no: an object that only looks like such data is not asked."""


class Channel:
    """One end of the line between the two processes: requests, answers, and the objects that the other end may name."""

    def __init__(self, descriptor: int) -> None:
        self._incoming = os.fdopen(os.dup(descriptor), "rb")
        self._descriptor = descriptor
        self._objects: list[Any] = []

    def send(self, message: object) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self._descriptor, data) :]

    def receive(self) -> Any:
        """The next message. Raises EOFError where the other end is gone."""
        line = self._incoming.readline()
        if not line:
            raise EOFError("the other process has ended")
        return json.loads(line)

    def pack(self, value: Any) -> Any:
        """A value as JSON. Subclasses of plain types count as these; objects become numbers."""
        if value is None:
            return None
        for plain in (bool, float, str, int):
            if isinstance(value, plain):
                return plain(value)
        if isinstance(value, Remote):
            return {"yours": value._number}
        if isinstance(value, dict):
            return {"dict": [[self.pack(key), self.pack(each)] for key, each in value.items()]}
        for name, kind in _COLLECTIONS.items():
            if isinstance(value, kind):  # pyright: ignore[reportArgumentType]
                return {name: [self.pack(each) for each in value]}
        if isinstance(value, bytes):
            return {"bytes": value.hex()}
        if isinstance(value, complex | Fraction | Decimal):
            return {type(value).__name__: str(value)}
        if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            return {"array": self.pack(value.tolist())} if getattr(value, "shape", ()) else self.pack(value.tolist())
        self._objects.append(value)
        return {"object": len(self._objects) - 1}

    def unpack(self, message: Any) -> Any:
        """The inverse of `pack`, whatever the other end sent."""
        if not isinstance(message, dict):
            return message
        ((name, content),) = message.items()
        if name == "yours":
            return self._objects[content]
        if name == "object":
            return Remote(self, content)
        if name == "dict":
            return {self.unpack(key): self.unpack(value) for key, value in content}
        if name == "array":
            return importlib.import_module("numpy").array(self.unpack(content))
        return _TEXTS[name](content) if name in _TEXTS else _COLLECTIONS[name](map(self.unpack, content))

    # ------------------------------------------------------------------ the program's end

    def serve(self, names: Mapping[str, Any]) -> None:
        """Does what the judge asks for, until it is gone."""
        try:
            while True:
                self.answer(self.receive(), names)
        except EOFError:
            return

    def answer(self, request: list[Any], names: Mapping[str, Any] | None) -> None:
        """Carries out one request. Without `names`, at the judge's end, that can only be a call of what was passed."""
        verb, target, *rest = request
        values = [self.unpack(each) for each in rest]
        try:
            if verb == "call":
                result = self._objects[target](*values[0], **values[1])
            elif names is None:
                raise TypeError(f"{verb} is not for the program to ask")
            elif verb == "name":
                mine = target in names and names[target] is not getattr(builtins, target, None)
                return self.send({"found": mine and not isinstance(names[target], types.ModuleType)})
            elif verb == "value":
                result = names[target]
            elif verb == "attribute":
                result = getattr(self._objects[target], *values)
            elif verb == "set":
                result = setattr(self._objects[target], *values)
            else:
                result = (getattr(operator, target, None) or getattr(builtins, target))(*values)
            changed = [self.pack(each) for each in values[0]] if verb == "call" else []
            self.send({"result": self.pack(result), "changed": changed})
        except BaseException as error:
            self.send({"error": type(error).__name__, "message": str(error)[:1000]})

    # ------------------------------------------------------------------ the judge's end

    def ask(self, verb: str, target: int | str, *values: object) -> Any:
        """What the program gives. An exception there is one here: the built-in one of its name, or a RuntimeError."""
        self.send([verb, target, *map(self.pack, values)])
        while isinstance(answer := self.receive(), list):
            self.answer(answer, None)
        if "found" in answer:
            return answer["found"] is True
        if "error" in answer:
            kind = getattr(builtins, str(answer["error"]), None)
            if isinstance(kind, type) and issubclass(kind, Exception):
                raise kind(str(answer["message"]))
            raise RuntimeError(str(answer["message"]))
        if verb == "call":
            for mine, theirs in zip(values[0], answer["changed"], strict=True):  # pyright: ignore[reportArgumentType]
                _change(mine, self.unpack(theirs))
        return self.unpack(answer["result"])


def _change(value: Any, changed: Any) -> None:
    """Gives a list, dict or set of the judge's the contents that the program left in its copy."""
    if isinstance(value, list) and isinstance(changed, list):
        value[:] = changed
    elif isinstance(value, dict | set) and isinstance(changed, type(value)):
        value.clear()
        value.update(changed)


class Remote:
    """An object of the program's. It can be called and looked into; with plain data it cannot be compared or combined,
    for then it would decide what it is equal to, and see what is expected of it."""

    __slots__ = ("_channel", "_number")

    def __init__(self, channel: Channel, number: int) -> None:
        object.__setattr__(self, "_channel", channel)
        object.__setattr__(self, "_number", number)

    def _do(self, name: str, *others: object) -> Any:
        return self._channel.ask("do", name, self, *others)

    def __call__(self, *args: object, **options: object) -> Any:
        return self._channel.ask("call", self._number, list(args), options)

    def __getattr__(self, name: str) -> Any:
        if name in _PREDICATES:
            raise AttributeError(f"{name}, of an object that is no plain data")
        return self._channel.ask("attribute", self._number, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._channel.ask("set", self._number, name, value)

    def __iter__(self) -> Iterator[Any]:
        return _items(self._do("iter"))

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, Remote) and self._channel.ask("do", "isinstance", value, self) is True

    def __getitem__(self, key: object) -> Any:
        return self._do("getitem", key)

    def __setitem__(self, key: object, value: object) -> None:
        self._do("setitem", key, value)

    def __len__(self) -> int:
        return self._do("len")

    def __bool__(self) -> bool:
        return self._do("bool") is True

    def __str__(self) -> str:
        return str(self._do("str"))

    def __repr__(self) -> str:
        return str(self._do("repr"))

    def __hash__(self) -> int:
        return int(self._do("hash"))


def _items(iterator: Any) -> Iterator[Any]:
    while True:
        try:
            item = iterator._do("next")
        except StopIteration:
            return
        yield item


def _between_remotes(name: str) -> Callable[[Remote, object], Any]:
    def method(self: Remote, other: object) -> Any:
        return self._do(name, other) if isinstance(other, Remote) else NotImplemented

    return method


_COMBINING = ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor")
for _name in _COMBINING:
    setattr(Remote, f"__{_name}__", _between_remotes(f"__{_name}__"))


# --------------------------------------------------------------------------- judging


def judge(statement: str, descriptor: int) -> bool:
    """Whether an assert holds. Raises what it raises where it does not.

    A name that the program has, but Python or its library too, may be what is tested or what tests it: the assert must
    hold either way.
    """
    channel, tree = Channel(descriptor), ast.parse(statement)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    own = {name: value for name in names for value in _own(name, tree)}
    programs = {name for name in sorted(names) if channel.ask("name", name)}
    code = compile(tree, "assert", "exec")
    for taken in (programs - own.keys(), programs) if programs & own.keys() else (programs,):
        exec(code, own | {name: channel.ask("value", name) for name in sorted(taken)})
    return True


def _own(name: str, tree: ast.AST) -> Iterator[object]:
    """What Python itself has under a name, if anything: a built-in, or a module with all that is asked of it."""
    if hasattr(builtins, name) or name == "isclose":
        yield getattr(builtins, name, math.isclose)
        return
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    attributes = {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == name}
    package = {"np": "numpy"}.get(name, name)
    if attributes and (package == "numpy" or package in sys.stdlib_module_names):
        try:
            module = importlib.import_module(package)
        except ImportError:
            return
        if all(hasattr(module, attribute) for attribute in attributes):
            yield module
