"""The house rules, checked on the syntax tree: who may import whom, and what no file may do.

Each rule is a function from the files of a package to its violations; each is also run on a small bad package, so that
a rule that has stopped seeing anything fails too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "trivium"

DEPARTMENTS = {
    "models", "text", "tasks", "workflows", "rewards", "engines", "buffers", "algorithms", "training", "sync",
    "monitors",
}  # fmt: skip
SHELL = {"frontdoors", "cluster", "serving", "assemble", "launch", "viewer", "cli", "testing", "demo", "__main__"}
CORE_PACKAGES = {"numpy", "pydantic", "yaml", "safetensors.numpy"}

MAY_CATCH_EVERYTHING = {
    "trivium.explorer": (1, "the rollout boundary: a failed rollout is data, judged by max_failed_fraction"),
    "trivium.rewards.calling": (2, "a reward that raised fails its own trajectory, and no other in the call"),
    "trivium.rewards.scoring": (1, "a scorer that raised: its sample is named, in an error or in what is counted"),
    "trivium.rewards.child": (1, "a child process answers with the error, which its parent raises"),
    "trivium.engines.torch": (1, "the worker thread hands its error to every caller that waits for it"),
    "trivium.cluster.crew": (1, "the errors of all roles are gathered; the likeliest first cause among them is raised"),
    "trivium.cluster.remote": (3, "an error crosses from one process to the caller in another, who raises it"),
    "trivium.synchronizer": (1, "nobody awaits the heart's thread: `tend` raises what stopped it"),
    "trivium.threads": (1, "an error crosses from a thread to the coroutine that waits for it"),
}
"""How many handlers of a module may take any exception without raising it themselves, and why."""

MAY_PRINT = {"trivium.cli", "trivium.monitors.console"}

PRINTED_WHOLE = {"Plan", "StagePlan"}
"""Config classes that are results: their reader is whoever reads the printed plan."""

LAZY_DOORS = {
    ("trivium.protocols", "trivium.loops"): "the seeds' TrainEngine.train_step is loops.train_step under another name",
    ("trivium", "trivium.launch"): "`from trivium import run`, imported when asked for",
    ("trivium.remote", "fsspec"): "opened where a config names a remote directory; it comes with torch",
}
"""Imports inside functions that the layering would forbid, and why."""


@dataclass(frozen=True)
class Import:
    """One import of a module, as the interpreter would execute it."""

    target: str
    line: int
    lazy: bool
    """Inside a function."""


@dataclass(frozen=True)
class Module:
    """One file."""

    name: str
    path: Path
    modules: frozenset[str]
    """Every module of the package, to tell `from package import module` from `from module import name`."""

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"))

    @property
    def room(self) -> str:
        """The first part below the package: `types`, `engines`, `cli`; empty for the package itself."""
        return self.name.partition(".")[2].partition(".")[0]

    @property
    def layer(self) -> str:
        if self.room in DEPARTMENTS or self.room in SHELL:
            return "department" if self.room in DEPARTMENTS else "shell"
        return "core" if self.path.parent.name == "trivium" else "unknown"

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        return tuple(self._imports(self.tree, lazy=False))

    def _imports(self, node: ast.AST, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                for other in child.orelse:
                    yield from self._imports(other, lazy)
            elif isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, lazy) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                yield from self._import_from(child, lazy)
            else:
                inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from self._imports(child, lazy or inside)

    def _import_from(self, node: ast.ImportFrom, lazy: bool) -> Iterator[Import]:
        base = node.module or ""
        if node.level:
            package = self.name.split(".") if self.path.name == "__init__.py" else self.name.split(".")[:-1]
            base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
        for alias in node.names:
            whole = f"{base}.{alias.name}"
            yield Import(whole if whole in self.modules else base, node.lineno, lazy)


def package(root: Path) -> list[Module]:
    """Every module under `root`, whose own name is the package's."""
    paths = {".".join([root.name, *p.relative_to(root).with_suffix("").parts]): p for p in sorted(root.rglob("*.py"))}
    named = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    return [Module(name, path, frozenset(named)) for name, path in named.items()]


Rule = Callable[[list[Module]], list[str]]


# --------------------------------------------------------------------------- rules


def forbidden_imports(modules: list[Module]) -> list[str]:
    """Core imports nothing above it or heavy; departments stand on core and models; nobody imports the shell."""
    layers = {module.name: module for module in modules}
    found: list[str] = []
    for module in modules:
        if module.layer == "unknown":
            found.append(f"{module.name}: the room {module.room!r} is not in the layout")
        for item in module.imports:
            target = layers.get(item.target)
            if item.lazy and (module.name, item.target) in LAZY_DOORS:
                continue
            if target is None:
                if module.layer == "core" and not _core_package(item.target):
                    found.append(f"{module.name}:{item.line}: core imports {item.target}")
            elif not _allowed(module, target):
                found.append(f"{module.name}:{item.line}: {module.layer} imports {target.layer} {item.target}")
    return found


def _core_package(name: str) -> bool:
    """Whether core may import something outside the package."""
    top = name.partition(".")[0]
    return top in sys.stdlib_module_names or top in CORE_PACKAGES or name in CORE_PACKAGES or top == "trivium"


def _allowed(module: Module, target: Module) -> bool:
    if module.layer == "shell":
        return True
    if target.layer == "department" and module.layer == "department":
        return target.room in (module.room, "models")
    return target.layer == "core"


def one_file_knows_every_department(modules: list[Module]) -> list[str]:
    """Only `assemble` may import from half of the departments or more; other shells take what they are about."""
    rooms = {
        module.name: {item.target.split(".")[1] for item in module.imports if item.target.startswith("trivium.")}
        for module in modules
        if module.room != "assemble"
    }
    return [f"{name} knows {sorted(r & DEPARTMENTS)}" for name, r in rooms.items() if len(r & DEPARTMENTS) >= 6]


def import_cycles(modules: list[Module]) -> list[str]:
    """Modules that import one another, at import time or later; `TYPE_CHECKING` imports are no imports."""
    names = {module.name for module in modules}
    edges = {
        module.name: sorted({i.target for i in module.imports if i.target in names} - {module.name})
        for module in modules
    }
    found: list[str] = []
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            found.append(" -> ".join([*path[path.index(name) :], name]))
        elif name not in done:
            for target in edges[name]:
                visit(target, [*path, name])
            done.add(name)

    for name in sorted(edges):
        visit(name, [])
    return found


def swallowed_exceptions(modules: list[Module]) -> list[str]:
    """Handlers of everything that neither raise nor hand the error on, and `suppress` of everything."""
    found: list[str] = []
    for module in modules:
        here: list[str] = []
        for node in ast.walk(module.tree):
            swallows = isinstance(node, ast.ExceptHandler) and _catches_all(node.type) and not _passes_on(node)
            suppresses = (
                isinstance(node, ast.Call) and _name(node.func) == "suppress" and any(map(_catches_all, node.args))
            )
            if swallows or suppresses:
                here.append(f"{module.name}:{node.lineno}: an exception is swallowed")
        allowed, _ = MAY_CATCH_EVERYTHING.get(module.name, (0, ""))
        found += here if len(here) != allowed else []
    return found


def _name(node: ast.expr | None) -> str:
    """The last part of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _catches_all(caught: ast.expr | None) -> bool:
    kinds = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(kind is None or _name(kind) in ("Exception", "BaseException", "ExceptionGroup") for kind in kinds)


def _passes_on(handler: ast.ExceptHandler) -> bool:
    """Whether the body raises, or gives the error to a future that raises it for its waiter."""
    return any(
        isinstance(node, ast.Raise)
        or (
            isinstance(node, ast.Call) and _name(node.func) == "set_exception" and handler.name in map(_name, node.args)
        )
        for node in ast.walk(handler)
    )


def prints(modules: list[Module]) -> list[str]:
    """Calls of `print` outside the command line and the console monitor."""
    return [
        f"{module.name}:{node.lineno}: print"
        for module in modules
        if module.name not in MAY_PRINT
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def unread_config_fields(modules: list[Module]) -> list[str]:
    """Fields of sections that no code looks at: `something.field` occurs nowhere."""
    read = {
        node.attr
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    return [
        f"{module.name}:{field.lineno}: nobody reads {section.name}.{field.target.id}"
        for module in modules
        for section in ast.walk(module.tree)
        if isinstance(section, ast.ClassDef) and _is_section(section) and section.name not in PRINTED_WHOLE
        for field in section.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if not field.target.id.startswith("_") and field.target.id not in read
    ]


def _is_section(node: ast.ClassDef) -> bool:
    """Whether a class is a config section, by the name of a base: `Plugin`, `EngineConfig`, `Other.Config`."""
    return any(_name(base).endswith("Config") or _name(base) in ("Plugin", "BaseModel") for base in node.bases)


def pickles(modules: list[Module]) -> list[str]:
    """Anything that writes or reads pickles: the packages, torch.save and torch.load, numpy with `allow_pickle`."""
    found: list[str] = []
    for module in modules:
        found += [
            f"{module.name}:{item.line}: imports {item.target}"
            for item in module.imports
            if item.target.partition(".")[0] in ("pickle", "dill", "cloudpickle", "shelve", "joblib", "marshal")
        ]
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.save", "torch.load"):
                found.append(f"{module.name}:{node.lineno}: {ast.unparse(node.func)}")
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                found.append(f"{module.name}:{node.lineno}: allow_pickle")
            if isinstance(node, ast.ImportFrom) and node.module == "torch":
                found += [
                    f"{module.name}:{node.lineno}: torch.{a.name}" for a in node.names if a.name in ("save", "load")
                ]
    return found


RULES: list[Rule] = [
    forbidden_imports, one_file_knows_every_department, import_cycles, swallowed_exceptions, prints,
    unread_config_fields, pickles,
]  # fmt: skip


# --------------------------------------------------------------------------- the house


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps_the_rule(rule: Rule) -> None:
    assert rule(package(ROOT)) == []


def test_the_command_line_starts_without_torch() -> None:
    code = "import sys, trivium.cli; print(sorted({'torch', 'transformers', 'ray'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "[]"


def test_every_exception_to_a_rule_is_still_needed() -> None:
    names = {module.name: module for module in package(ROOT)}
    assert MAY_PRINT | set(MAY_CATCH_EVERYTHING) <= set(names)
    for module, target in LAZY_DOORS:
        assert target in {item.target for item in names[module].imports}, f"{module} no longer imports {target}"


# --------------------------------------------------------------------------- the rules themselves

BAD: list[tuple[Rule, dict[str, str], str]] = [
    (forbidden_imports, {"types.py": "import torch"}, "core imports torch"),
    (forbidden_imports, {"types.py": "def f():\n    import ray"}, "core imports ray"),
    (forbidden_imports, {"types.py": "from safetensors.torch import save"}, "core imports safetensors.torch"),
    (
        forbidden_imports,
        {"loops.py": "from trivium.engines.torch import X", "engines/torch.py": ""},
        "core imports depa",
    ),
    (forbidden_imports, {"loops.py": "from trivium.models import load", "models/load.py": ""}, "core imports depart"),
    (forbidden_imports, {"loops.py": "from .cli import main", "cli.py": ""}, "core imports shell"),
    (forbidden_imports, {"engines/a.py": "import trivium.training.b", "training/b.py": ""}, "department imports depa"),
    (forbidden_imports, {"engines/a.py": "from ..training import b", "training/b.py": ""}, "department imports depart"),
    (forbidden_imports, {"models/a.py": "from trivium.engines import b", "engines/b.py": ""}, "department imports dep"),
    (
        forbidden_imports,
        {"engines/a.py": "def f():\n    from trivium import cli", "cli.py": ""},
        "department imports s",
    ),
    (forbidden_imports, {"helpers/a.py": ""}, "not in the layout"),
    (
        one_file_knows_every_department,
        {"demo.py": "\n".join(f"import trivium.{room}" for room in sorted(DEPARTMENTS))},
        "trivium.demo knows",
    ),
    (
        import_cycles,
        {"a.py": "import trivium.b", "b.py": "from trivium import a"},
        "trivium.a -> trivium.b -> trivium.a",
    ),
    (import_cycles, {"a.py": "from trivium.b import x", "b.py": "def f():\n    import trivium.a"}, "trivium.b"),
    (swallowed_exceptions, {"a.py": "try:\n    f()\nexcept Exception:\n    log()"}, "a:3"),
    (swallowed_exceptions, {"a.py": "try:\n    f()\nexcept:\n    pass"}, "a:3"),
    (swallowed_exceptions, {"a.py": "try:\n    f()\nexcept (OSError, BaseException) as e:\n    print(e)"}, "a:3"),
    (swallowed_exceptions, {"a.py": "with suppress(Exception):\n    f()"}, "a:1"),
    (swallowed_exceptions, {"a.py": "try:\n    f()\nexcept Exception as e:\n    x.set_exception(y)"}, "a:3"),
    (prints, {"engines/a.py": "def f():\n    print(1)"}, "engines.a:2"),
    (unread_config_fields, {"a.py": "class A:\n    class Config(Plugin):\n        speed: int = 1"}, "Config.speed"),
    (unread_config_fields, {"a.py": "class B(A.Config):\n    speed: int = 1\nx.speed = 2"}, "B.speed"),
    (pickles, {"a.py": "import pickle"}, "imports pickle"),
    (pickles, {"a.py": "from dill import loads"}, "imports dill"),
    (pickles, {"a.py": "torch.save(x, y)"}, "torch.save"),
    (pickles, {"a.py": "from torch import load"}, "torch.load"),
    (pickles, {"a.py": "np.load(x, allow_pickle=True)"}, "allow_pickle"),
]

GOOD: list[tuple[Rule, dict[str, str]]] = [
    (forbidden_imports, {"types.py": "import json\nimport numpy.typing\nfrom safetensors.numpy import save"}),
    (forbidden_imports, {"engines/a.py": "import torch\nfrom trivium.models import b\nimport trivium.types",
                         "models/b.py": "", "types.py": "", "engines/c.py": "from trivium.engines import a"}),
    (forbidden_imports, {"cli.py": "import trivium.assemble", "assemble.py": "import trivium.sync.a", "sync/a.py": ""}),
    (import_cycles, {"a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import trivium.b",
                     "b.py": "import trivium.a"}),
    (swallowed_exceptions, {"a.py": "try:\n    f()\nexcept Exception as e:\n    raise Other from e"}),
    (swallowed_exceptions, {"a.py": "try:\n    f()\nexcept BaseException as e:\n    future.set_exception(e)"}),
    (swallowed_exceptions, {"a.py": "try:\n    f()\nexcept OSError:\n    pass"}),
    (prints, {"cli.py": "print(1)"}),
    (unread_config_fields, {"a.py": "class A:\n    class Config(Plugin):\n        speed: int = 1\n\nconfig.speed"}),
    (pickles, {"a.py": "model.save(x)\njson.load(y)"}),
]  # fmt: skip


def bad_package(root: Path, files: dict[str, str]) -> list[Module]:
    for name, text in {"__init__.py": "", **files}.items():
        path = root / "trivium" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if path.parent.name != "trivium":
            (path.parent / "__init__.py").touch()
    return package(root / "trivium")


@pytest.mark.parametrize(("rule", "files", "says"), BAD)
def test_a_rule_sees_what_it_is_for(rule: Rule, files: dict[str, str], says: str, tmp_path: Path) -> None:
    assert says in "\n".join(rule(bad_package(tmp_path, files)))


@pytest.mark.parametrize(("rule", "files"), GOOD)
def test_a_rule_leaves_good_code_alone(rule: Rule, files: dict[str, str], tmp_path: Path) -> None:
    assert rule(bad_package(tmp_path, files)) == []
