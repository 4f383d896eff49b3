"""The modules of a package and what they import from one another, read from the syntax trees; nothing is executed."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Import:
    """One module that another imports."""

    target: str
    line: int
    kind: Literal["module", "function", "type"]
    """Executed with the module, when a function runs, or only by a type checker (`if TYPE_CHECKING`)."""


@dataclass(frozen=True)
class Module:
    """One file."""

    name: str
    """Dotted; a package's `__init__.py` has the name of the package."""
    path: Path
    root: Path
    """The package's folder."""
    modules: frozenset[str]
    """Every module of the package, to tell `from package import module` from `from module import name`."""

    @cached_property
    def source(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the tree, in the order of `ast.walk`."""
        return tuple(ast.walk(self.tree))

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        """All of them, from inside and outside the package, in the order of the file."""
        return tuple(self._imports(self.tree.body, "module"))

    def _imports(self, nodes: Iterable[ast.AST], kind: Literal["module", "function", "type"]) -> Iterator[Import]:
        for node in nodes:
            if isinstance(node, ast.Import):
                yield from (Import(alias.name, node.lineno, kind) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node)
                for alias in node.names:
                    submodule = f"{base}.{alias.name}"
                    yield Import(submodule if submodule in self.modules else base, node.lineno, kind)
            elif isinstance(node, ast.expr):
                continue  # no import stands in one, and nine of ten nodes do
            elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
                yield from self._imports(node.body, "type")
                yield from self._imports(node.orelse, kind)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and kind == "module":
                yield from self._imports(node.body, "function")
            else:
                yield from self._imports(ast.iter_child_nodes(node), kind)

    def _absolute(self, node: ast.ImportFrom) -> str:
        """The module named between `from` and `import`, leading dots resolved."""
        if not node.level:
            return node.module or ""
        package = self.name.split(".") if self.path.name == "__init__.py" else self.name.split(".")[:-1]
        return ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])


def package(root: Path) -> list[Module]:
    """Every module under `root`, whose folder's name is that of the package."""
    paths = {".".join([root.name, *p.relative_to(root).with_suffix("").parts]): p for p in sorted(root.rglob("*.py"))}
    named = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    return [Module(name, path, root, frozenset(named)) for name, path in named.items()]


def import_graph(modules: Iterable[Module]) -> dict[str, set[str]]:
    """Each module and those of the same package that it imports, by any kind of import."""
    return {m.name: {item.target for item in m.imports if item.target in m.modules} - {m.name} for m in modules}


def import_cycles(graph: Mapping[str, Set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one module, each sorted, the largest first."""
    reached = {name: _reachable(graph, name) for name in graph}
    components = {tuple(sorted(o for o in reached[name] if name in reached[o])) for name in graph}
    return [list(c) for c in sorted(components, key=lambda c: (-len(c), c)) if len(c) > 1]


def _reachable(graph: Mapping[str, Set[str]], start: str) -> set[str]:
    """The modules at the end of any path of one edge or more."""
    reached: set[str] = set()
    waiting = [*graph[start]]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += graph[name]
    return reached
