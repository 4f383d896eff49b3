"""Evaluates an `assert` in one process while the functions that it calls run in another one: `holds` and `serve`.

The text of this file runs in both, inside the sandbox (`confine.py`), with nothing but the standard library. The two
processes exchange calls and their results. Plain data crosses by value; any other object stays in its process, and the
other end calls it by number. A `Remote` stands for such an object of the program in the judge's process, and each of
its operations is a call, too. The judge's own interpreter decides whether the assert holds: the program sees the
arguments of the calls, never the values that their results are compared with.
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
"""Methods of plain data that answer yes or no. A `Remote` has none of them: otherwise the program would
decide the answer."""


class End:
    """One end of the exchange. `objects` are those that the other end may call by number; `can_operate` lets it use
    Python's operators and built-in functions here."""

    def __init__(self, descriptor: int, can_operate: bool, *objects: Any) -> None:
        self._incoming = os.fdopen(os.dup(descriptor), "rb")
        self._descriptor, self._can_operate = descriptor, can_operate
        self._objects = [*objects]

    def call(self, function: int | str, /, *args: Any, **options: Any) -> Any:
        """The result of an object or an operation of the other end. Raises what it raised: the built-in exception of
        that name, or a RuntimeError."""
        self._send([function, self._pack(list(args)), self._pack(options)])
        while isinstance(answer := self._receive(), list):
            self.answer(answer)
        if "error" in answer:
            kind = getattr(builtins, str(answer["error"]), None)
            if not isinstance(kind, type) or not issubclass(kind, Exception):
                kind = RuntimeError
            raise kind(str(answer["message"]))
        for mine, theirs in zip(args, answer["changed"], strict=True):
            _change(mine, self._unpack(theirs))
        return self._unpack(answer["result"])

    def serve(self) -> None:
        """Answers calls until the other end is gone."""
        try:
            while True:
                self.answer(self._receive())
        except EOFError:
            return

    def answer(self, request: list[Any]) -> None:
        try:
            args, options = map(self._unpack, request[1:])
            result = self._function(request[0])(*args, **options)
            changed = [self._pack(argument) if isinstance(argument, list | dict | set) else None for argument in args]
            self._send({"result": self._pack(result), "changed": changed})
        except BaseException as error:
            self._send({"error": type(error).__name__, "message": str(error)[:1000]})

    def _function(self, name: int | str) -> Callable[..., Any]:
        if isinstance(name, int):
            return self._objects[name]
        if not self._can_operate:
            raise TypeError("a program may call only the objects that it was given")
        return getattr(operator, name, None) or getattr(builtins, name)

    def _send(self, message: object) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self._descriptor, data) :]

    def _receive(self) -> Any:
        line = self._incoming.readline()
        if not line:
            raise EOFError("the other process has ended")
        return json.loads(line)

    def _pack(self, value: Any) -> Any:
        """A value as JSON. Values of a subclass of a plain type become that type; other objects become numbers."""
        if value is None:
            return None
        for plain in (bool, float, str, int):
            if isinstance(value, plain):
                return plain(value)
        if isinstance(value, Remote):
            return {"yours": value._number}
        if isinstance(value, dict):
            return {"dict": [[self._pack(key), self._pack(content)] for key, content in value.items()]}
        for name, kind in _COLLECTIONS.items():
            if isinstance(value, kind):  # pyright: ignore[reportArgumentType]
                return {name: [self._pack(element) for element in value]}
        if isinstance(value, bytes):
            return {"bytes": value.hex()}
        if isinstance(value, complex | Fraction | Decimal):
            return {type(value).__name__: str(value)}
        if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            return {"array": self._pack(value.tolist())} if getattr(value, "shape", ()) else self._pack(value.tolist())
        self._objects.append(value)
        return {"object": len(self._objects) - 1}

    def _unpack(self, message: Any) -> Any:
        """The inverse of `_pack`, for whatever the other end sent."""
        if not isinstance(message, dict):
            return message
        ((name, content),) = message.items()
        if name == "yours":
            return self._objects[content]
        if name == "object":
            return Remote(self, content)
        if name == "dict":
            return {self._unpack(key): self._unpack(value) for key, value in content}
        if name == "array":
            return importlib.import_module("numpy").array(self._unpack(content))
        return _TEXTS[name](content) if name in _TEXTS else _COLLECTIONS[name](map(self._unpack, content))


def _change(value: Any, changed: Any) -> None:
    """Gives a list, dict or set the contents that the other end left in its copy."""
    if isinstance(value, list) and isinstance(changed, list):
        value[:] = changed
    elif isinstance(value, dict | set) and isinstance(changed, type(value)):
        value.clear()
        value.update(changed)


class Remote:
    """An object of the other end. It can be called, iterated and looked into, but not compared or combined with plain
    data: otherwise the program would decide what its object is equal to, and would see the expected value."""

    __slots__ = ("_end", "_number")

    def __init__(self, end: End, number: int) -> None:
        object.__setattr__(self, "_end", end)
        object.__setattr__(self, "_number", number)

    def __call__(self, /, *args: object, **options: object) -> Any:
        return self._end.call(self._number, *args, **options)

    def __getattr__(self, name: str) -> Any:
        if name in _PREDICATES:
            raise AttributeError(f"{name}, of an object that is not plain data")
        return self._end.call("getattr", self, name)

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, Remote) and self._end.call("isinstance", value, self) is True


def _operation(name: str, is_for_remotes: bool) -> Callable[..., Any]:
    """A special method of `Remote`, run by the other end. With `is_for_remotes`, its operand must be a `Remote`."""

    def method(self: Remote, *others: object) -> Any:
        if is_for_remotes and not isinstance(others[0], Remote):
            return NotImplemented
        return self._end.call(name, self, *others)

    return method


for _name in ("setattr", "iter", "next", "len", "bool", "str", "repr", "hash", "getitem", "setitem"):
    setattr(Remote, f"__{_name}__", _operation(_name, is_for_remotes=False))
_COMBINING = ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor")
for _name in _COMBINING:
    setattr(Remote, f"__{_name}__", _operation(f"__{_name}__", is_for_remotes=True))


# --------------------------------------------------------------------------- the program's process


def serve(descriptor: int, names: Mapping[str, Any]) -> None:
    """Answers the judge's calls of what a program defines. Object 0 is the dict of these names, without modules and
    built-ins."""
    nothing = object()
    defined = {
        name: value
        for name, value in names.items()
        if value is not getattr(builtins, name, nothing) and not isinstance(value, types.ModuleType)
    }
    End(descriptor, True, defined).serve()


# --------------------------------------------------------------------------- the judge's process


def holds(statement: str, descriptor: int) -> bool:
    """Returns True if an assert holds, and raises what it raises if not.

    A name that both the program and Python or its library define may be what is tested or what tests it: the assert
    must hold either way.
    """
    end, tree = End(descriptor, False), ast.parse(statement)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    builtin_values = {name: value for name in names for value in _own(name, tree)}
    defined = Remote(end, 0)
    programs = {name for name in sorted(names) if end.call("contains", defined, name) is True}
    code = compile(tree, "assert", "exec")
    # First a name that both define is Python's, then it is the program's.
    for from_program in (
        (programs - builtin_values.keys(), programs) if programs & builtin_values.keys() else (programs,)
    ):
        exec(code, builtin_values | {name: end.call("getitem", defined, name) for name in sorted(from_program)})
    return True


def _own(name: str, tree: ast.AST) -> Iterator[object]:
    """Yields what Python itself defines under a name, if anything: a built-in, or a module that has every attribute
    that the assert reads from the name."""
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
