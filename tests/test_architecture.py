"""The rules of the repository layout, checked on syntax trees: which module may import which, what no file may do.

Each rule is a function from the modules of a package to its violations. Each is also run on small packages that break
it, so that a rule that no longer detects anything fails too.
"""

from __future__ import annotations

import ast
import gc
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path

import import_graph
import pytest
from import_graph import Module, package

from trivium.text.tiny import tiny_tokenizer

PRODUCT_ROOT = Path(__file__).parents[1] / "trivium"
PRODUCT = package(PRODUCT_ROOT)


PACKAGES = {
    "models",
    "clients",
    "processes",
    "text",
    "tasks",
    "workflows",
    "rewards",
    "engines",
    "buffers",
    "algorithms",
    "training",
    "sync",
    "monitors",
}
SHARED_PACKAGES = {"models", "clients", "processes", "text"}
"""What other packages may import."""
MAX_ROOT_MODULES = 12

SHELL = {"api", "frontdoors", "cluster", "serving", "runtime", "inspection", "cli", "testing", "__main__"}
CORE_FOLDERS = {"foundation", "planning", "config", "checkpoint", "protocols", "types"}
CORE_DEPENDENCIES = {"numpy", "pydantic", "yaml", "safetensors.numpy"}

MAY_CATCH_EVERYTHING = {
    "trivium.processes.answers": (1, "an error crosses to the process that called, which raises it"),
    "trivium.processes.link": (2, "an error crosses to the process that called, which raises it"),
    "trivium.foundation.errors": (1, "the text of an error names what its __str__ raised"),
    "trivium.trainer": (1, "a save after a failure that fails as well must not hide it"),
    "trivium.explorer": (1, "the rollout boundary: a failed rollout is data, judged by max_failed_fraction"),
    "trivium.processes.user_calls": (
        1,
        "an error of a user's function is returned, and the caller adds its context",
    ),
    "trivium.rewards.sandbox.asserts": (1, "the program's process answers with the error, which the judge raises"),
    "trivium.engines.torch.engine": (1, "the worker thread hands its error to every caller that waits for it"),
    "trivium.serving.tinker.service": (1, "a step that the metrics lack has moved the weights: its client goes on"),
    "trivium.cluster.supervisor": (1, "the errors of all roles are collected; the likeliest first cause is raised"),
    "trivium.cluster.actors": (3, "an error crosses from one process to the caller in another, who raises it"),
    "trivium.buffers.memory": (1, "what the work of a waiter raises is raised by the waiter, which runs it again"),
    "trivium.foundation.concurrency": (
        2,
        "an error crosses from a thread to the coroutine that waits for it, or that watches it",
    ),
}
"""How many handlers of a module may take any exception without raising it themselves, and why."""

MAY_PICKLE = {
    "trivium.processes.isolated.answers": "a process and its own fork, over a socket that they alone have",
    "trivium.processes.link": "processes of one run, over a socket or a key that they alone have",
}

MAY_PRINT = {"trivium.cli", "trivium.monitors.console", "trivium.frontdoors.lightrft.objects.strategy"}

PRINTED_WHOLE = {"PlanText", "StageText"}
"""Config classes that are results: their fields are read in the printed plan."""

LAZY_IMPORTS = {
    ("trivium", "trivium.runtime.python_api"): "`from trivium import run`, imported on first use",
    ("trivium", "trivium.inspection.report"): "what `trivium.run` sends to monitors after the last stage",
    ("trivium.checkpoint.remote", "fsspec"): "imported where a config names a remote directory; torch depends on it",
}
"""Imports inside functions that the layering would forbid, and why."""

PACKAGE_CYCLES = {("cli", "frontdoors")}
"""Packages that still import one another. The list may only shrink."""

SAME_BASENAME = {
    "__main__": "what `python -m` runs of a package",
    "algorithm_section": "how a front door translates the section that names the algorithm",
    "answers": "what a process answers to a call of another one",
    "base": "what the functions of one folder share",
    "batches": "experiences in batches: the types, and how an algorithm makes them of groups",
    "config": "the sections of a config, and a front door's translation of its original's",
    "config_table": "the keys of the config of a front door's original",
    "engine": "an engine: torch's, vLLM's, an endpoint's, and the one that trains",
    "engines": "rollout engines: the package, and their replicas on Ray",
    "forms": "requests to an engine outside this process, and its answers",
    "files": "the implementation of a protocol that keeps everything in files",
    "memory": "the implementation of a protocol that keeps everything in memory",
    "models": "models: the package, and those of a front door's original over it",
    "preference": "preference learning: the losses, and their config section",
    "ranks": "the processes that train together: in one of them, and from the driver",
    "remote": "what is on another machine: copies of checkpoints, and what computes rewards",
    "losses": "losses: of policies, and of preference learning",
    "objective": "how a loss function and a batch meet: of a policy, and of preference learning",
    "objects": "the classes and functions that a front door's users import",
    "rewards": "rewards: the core's, and a front door's adapters of its users'",
    "roles": "the roles of the processes of a run, Trivium's and verl's",
    "translation": "how a front door translates the config of its original",
    "tools": "tools: the calls in a completion, and the environment that runs them",
    "worker": "what runs in a worker process of vLLM, and verl's class for its users' workers",
    "section": "the config section that a package reads",
    "sections": "config sections: of the run, and of the algorithms",
    "synchronizer": "statuses and versions of the roles of a run: the core's, and Trinity's over it",
    "weights": "weights of models: in files and memory, and between the actors of a run",
    "trainer": "trainers: of the core, verl's and Trinity's over it",
}
"""Modules of one basename mean the same kind of thing: which."""


SLOW = ("transformers", "torch.distributed.fsdp", "torch.distributed.tensor", "peft", "trl")
"""What takes a second or more to import, and that reading and checking a config does without."""
FAST = ("transformers.pytorch_utils", "transformers.utils.logging")
"""Parts of it that import little else."""


@pytest.fixture(scope="module", autouse=True)
def forgotten() -> Generator[None]:
    """The parsed modules take 170 MB, which the process of other tests would keep."""
    yield
    for module in PRODUCT:
        for name in ("tree", "nodes", "source", "imports"):
            vars(module).pop(name, None)


Rule = Callable[[list[Module]], list[str]]

ONLY_ON_LINUX = {
    *("prctl", "sched_getaffinity", "sched_setaffinity", "pidfd_open", "mallopt", "malloc_trim", "sysv_signal"),
    *("unshare", "setns", "mount", "umount2", "capset", "syscall", "eventfd", "memfd_create", "splice", "epoll"),
    *("copy_file_range", "posix_fadvise", "posix_fallocate", "O_PATH", "O_TMPFILE", "O_DIRECT", "sched_setscheduler"),
    *("RLIMIT_AS", "RLIMIT_NPROC", "RLIMIT_MEMLOCK", "ru_maxrss", "SIGRTMIN", "SIGSTKFLT", "SIGPWR", "SO_PEERCRED"),
}
"""Attributes of modules and of the C library that macOS lacks, or counts in another unit."""
LINUX_FILES = ("/proc/", "/sys/", "/dev/shm")
IN_CONFINED_PROCESSES = 'if sys.platform != "linux":'
GUARDED = {
    ("foundation.concurrency", "prctl"): "children.is_file()",
    ("foundation.concurrency", "/proc/"): "except (FileNotFoundError, ProcessLookupError):",
    ("foundation.concurrency", "sched_getaffinity"): 'hasattr(os, "sched_getaffinity")',
    ("planning.machine", "/proc/"): "if file.is_file()",
    ("planning.machine", "/sys/"): "if file.is_file()",
    ("planning.machine", "ru_maxrss"): "return peak and peak +",  # `peak` is 0 without /proc
    ("engines.vllm.weight_files", "/dev/shm"): "memory.is_dir()",
    ("inspection.doctor", "/dev/shm"): 'shm := Path("/dev/shm")).is_dir()',
    ("inspection.doctor", "/proc/"): "if about.is_file()",
    ("models.cpu.allocator", "mallopt"): 'if sys.platform != "linux"',
    ("processes.isolated.answers", "/proc/"): "about.exists()",
    ("processes.isolated.answers", "RLIMIT_AS"): 'and sys.platform == "linux"',
    ("rewards.sandbox.runs", "/proc/"): "except OSError:\n        ids = _MAX_IDS",
    **{
        ("rewards.sandbox.confine", name): IN_CONFINED_PROCESSES
        for name in ("prctl", "unshare", "umount2", "mount", "capset", "syscall", "O_PATH", "/proc/")
    },
    ("runtime.main_loop", "sysv_signal"): 'if sys.platform != "linux"',
    ("serving.connections", "/proc/"): "if table.is_dir()",
    ("training.device", "/proc/"): "if info.is_file()",
}
"""(module, what only Linux has) -> the code beside it that does without."""


# --------------------------------------------------------------------------- rules


def folder(module: Module) -> str:
    """The first part below the root package: `types`, `engines`, `cli`; empty for the root package itself."""
    return module.name.partition(".")[2].partition(".")[0]


def layer(module: Module) -> str:
    if folder(module) in PACKAGES | SHELL:
        return "package" if folder(module) in PACKAGES else "shell"
    return "core" if module.path.parent == module.root or folder(module) in CORE_FOLDERS else "unknown"


def forbidden_imports(modules: list[Module]) -> list[str]:
    """Core imports neither packages nor heavy dependencies. Packages import core and `SHARED_PACKAGES`. Only the
    shell imports the shell, and only front doors and the command line import front doors. Every kind of import
    counts."""
    by_name = {module.name: module for module in modules}
    violations = [
        f"{module.name}: the folder {folder(module)!r} is not in the layout"
        for module in modules
        if layer(module) == "unknown"
    ]
    for module in modules:
        for item in module.imports:
            target = by_name.get(item.target)
            if item.kind == "function" and (module.name, item.target) in LAZY_IMPORTS:
                continue
            if target is None:
                if layer(module) == "core" and not _is_core_dependency(item.target):
                    violations.append(f"{module.name}:{item.line}: core imports {item.target}")
            elif not _may_import(module, target):
                violations.append(f"{module.name}:{item.line}: {layer(module)} imports {layer(target)} {item.target}")
    return violations


def _is_core_dependency(name: str) -> bool:
    """Whether core may import something outside the package."""
    top = name.partition(".")[0]
    return top in sys.stdlib_module_names or bool({top, name} & CORE_DEPENDENCIES) or top == "trivium"


def _may_import(module: Module, target: Module) -> bool:
    if layer(module) == "shell":
        return folder(target) != "frontdoors" or folder(module) in ("frontdoors", "cli")
    if layer(module) == layer(target) == "package":
        return folder(target) in {folder(module), *SHARED_PACKAGES}
    return layer(target) == "core"


def forbidden_paths(modules: list[Module]) -> list[str]:
    """Strings with the import path of a module that may not be imported from there: they import it all the same. The
    catalogue alone names the packages, whose plugins it lists, and the cluster, whose session it lists."""
    by_name = {module.name: module for module in modules}
    violations: list[str] = []
    for module in modules:
        for node in module.nodes:
            texts = [n.value for n in ast.iter_child_nodes(node) if isinstance(n, ast.Constant)]
            if isinstance(node, ast.Expr) or not texts:
                continue  # a docstring
            for path in re.findall(r"\btrivium(?:\.\w+)+", " ".join(text for text in texts if isinstance(text, str))):
                parts = path.split(".")
                known = (".".join(parts[:end]) for end in range(len(parts), 1, -1))
                target = next((by_name[name] for name in known if name in by_name), None)
                listed = (
                    module.name == "trivium.foundation.registry"
                    and target is not None
                    and (layer(target) == "package" or folder(target) == "cluster")
                )
                if target not in (None, module) and not listed and not _may_import(module, target):
                    violations.append(f"{module.name}: {layer(module)} names {layer(target)} {path}")
    return violations


def ray_outside_its_packages(modules: list[Module]) -> list[str]:
    """Imports of Ray, but for `cluster` and the front doors whose API is Ray's."""
    return [
        f"{module.name}:{item.line}: imports {item.target}"
        for module in modules
        if folder(module) not in ("cluster", "frontdoors")
        for item in module.imports
        if item.target.partition(".")[0] == "ray"
    ]


def slow_imports(modules: list[Module]) -> list[str]:
    """Imports of `SLOW` packages that are executed with their module, rather than where a function needs them. The
    object APIs of front doors may: whoever imports one builds models."""
    return [
        f"{module.name}:{item.line}: imports {item.target}"
        for module in modules
        if folder(module) != "frontdoors"
        for item in module.imports
        if item.kind == "module"
        and item.target not in FAST
        and f"{item.target}.".startswith(tuple(f"{s}." for s in SLOW))
    ]


def only_one_module_imports_every_package(modules: list[Module]) -> list[str]:
    """Only `runtime.build` may import from half of the packages or more; the rest of the shell imports what it uses.
    `api` lists names of all packages, and imports one when it is used."""
    used = {
        module.name: {item.target.split(".")[1] for item in module.imports if item.target.startswith("trivium.")}
        for module in modules
        if module.name not in ("trivium.runtime.build", "trivium.api")
    }
    return [f"{name} imports {sorted(names & PACKAGES)}" for name, names in used.items() if len(names & PACKAGES) >= 6]


def import_cycles(modules: list[Module]) -> list[str]:
    """Modules that import one another, imports for type checkers and inside functions included."""
    return [", ".join(cycle) for cycle in import_graph.import_cycles(import_graph.import_graph(modules))]


def package_cycles(modules: list[Module]) -> list[str]:
    """Packages that import one another, but for `PACKAGE_CYCLES`. Imports for type checkers and inside functions
    count."""
    return [", ".join(cycle) for cycle in all_package_cycles(modules) if cycle not in PACKAGE_CYCLES]


def all_package_cycles(modules: list[Module]) -> list[tuple[str, ...]]:
    """The packages of each cycle. Core is one package; the layers allow its imports in `LAZY_IMPORTS`."""
    package_of = {module.name: "core" if layer(module) == "core" else folder(module) for module in modules}
    graph: dict[str, set[str]] = {name: set() for name in package_of.values()}
    for module in modules:
        own = package_of[module.name]
        targets = {each.target for each in module.imports if (module.name, each.target) not in LAZY_IMPORTS}
        graph[own] |= {package_of[target] for target in targets & package_of.keys()} - {own}
    return [tuple(cycle) for cycle in import_graph.import_cycles(graph)]


def root_modules(modules: list[Module]) -> list[str]:
    """More than `MAX_ROOT_MODULES` modules at the root."""
    names = [module.name for module in modules if module.path.parent == module.root]
    return [f"{len(names)} modules at the root: {', '.join(names)}"] if len(names) > MAX_ROOT_MODULES else []


def repeated_basenames(modules: list[Module]) -> list[str]:
    """Modules of the same last name, unless `SAME_BASENAME` declares what they have in common."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for module in modules:
        places[module.name.rpartition(".")[2]].append(module.name)
    return [", ".join(names) for name, names in places.items() if len(names) > 1 and name not in SAME_BASENAME]


def format_skips(modules: list[Module]) -> list[str]:
    """Lines that the formatter is told to leave alone."""
    return [
        f"{module.name}:{number}: {line.strip()}"
        for module in modules
        for number, line in enumerate(module.source.splitlines(), start=1)
        if re.search(r"#\s*fmt:\s*(skip|off)\b", line)
    ]


def swallowed_exceptions(modules: list[Module]) -> list[str]:
    """Handlers of any exception that neither raise nor pass it to a future, and `suppress` of any exception."""
    found: list[str] = []
    for module in modules:
        here: list[str] = []
        for node in module.nodes:
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
        for node in module.nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def unread_config_fields(modules: list[Module]) -> list[str]:
    """Fields of config sections that no code reads: `something.field` occurs nowhere."""
    read = {
        node.attr
        for module in modules
        for node in module.nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    return [
        f"{module.name}:{field.lineno}: no code reads {section.name}.{field.target.id}"
        for module in modules
        for section in module.nodes
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
            and module.name not in MAY_PICKLE
        ]
        for node in module.nodes:
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.save", "torch.load"):
                found.append(f"{module.name}:{node.lineno}: {ast.unparse(node.func)}")
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                found.append(f"{module.name}:{node.lineno}: allow_pickle")
            if isinstance(node, ast.ImportFrom) and node.module == "torch":
                found += [
                    f"{module.name}:{node.lineno}: torch.{a.name}" for a in node.names if a.name in ("save", "load")
                ]
    return found


def unguarded_linux(modules: list[Module]) -> list[str]:
    """Names and files that only Linux has, in modules that `GUARDED` does not list with a guard that they contain."""
    found: list[str] = []
    for module in modules:
        documented = {id(node.value) for node in module.nodes if isinstance(node, ast.Expr)}
        for node in module.nodes:
            named = [node.attr] if isinstance(node, ast.Attribute) and node.attr in ONLY_ON_LINUX else []
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
                named = [file for file in LINUX_FILES if node.value.startswith(file)]
            for name in named:
                guard = GUARDED.get((module.name.partition(".")[2], name))
                if guard is None or guard not in module.source:
                    found.append(f"{module.name}:{node.lineno}: {name} without a guard in GUARDED")
    return found


def frozen_sentences(modules: list[Module]) -> list[str]:
    """Tests that compare an error of Trivium with a sentence, more than two words, rather than with the names in it
    (`failing.refused`)."""
    return [
        f"{module.name}:{node.lineno}: compares the sentence {text!r}"
        for module in modules
        for node in module.nodes
        if isinstance(node, ast.Call) and {_name(kind) for arg in node.args for kind in _parts(arg)} & trivium_errors()
        if _name(node.func) in ("raises", "refused", "check_error", "group_contains")
        for text in map(_literal, [*node.args, *(each.value for each in node.keywords if each.arg == "match")])
        if re.search(r"(?:^|\s)([A-Za-z']+:? ){2}[A-Za-z']+(?![^\s:,.)])", text)
    ]


def _parts(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else [node]


def _literal(node: ast.expr) -> str:
    """The text of a string; a value in it is a 0."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_literal(part) if isinstance(part, ast.Constant) else "0" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


@cache
def trivium_errors() -> set[str]:
    """The names of `TriviumError` and of the classes that derive from it."""
    bases = {
        node.name: {*map(_name, node.bases)} for m in PRODUCT for node in m.nodes if isinstance(node, ast.ClassDef)
    }
    errors: set[str] = set()
    while more := {name for name, above in bases.items() if name == "TriviumError" or above & errors} - errors:
        errors |= more
    return errors


def incomplete_errors(modules: list[Module]) -> list[str]:
    """Errors that are raised without one of their three parts. A class whose constructor writes the parts is left
    out, and so are those that derive from it."""
    classes = {node.name: node for m in modules for node in m.nodes if isinstance(node, ast.ClassDef)}

    def takes_parts(name: str) -> bool:
        node = classes.get(name)
        own = node is not None and any(_name_of(each) == "__init__" for each in node.body)
        return name in ("TriviumError", "ConfigError") or (not own and all(map(takes_parts, _error_bases(node))))

    return [
        f"{module.name}:{node.lineno}: {ast.unparse(node)[:80]}"
        for module in modules
        for node in module.nodes
        if isinstance(node, ast.Call) and _name(node.func) in trivium_errors() and takes_parts(_name(node.func))
        if not any(isinstance(arg, ast.Starred) for arg in node.args)
        if len(node.args) + len(node.keywords) < 3 or any(map(_is_empty, node.args[:3]))
    ]


def _name_of(node: ast.stmt) -> str:
    return node.name if isinstance(node, ast.FunctionDef) else ""


def _error_bases(node: ast.ClassDef | None) -> list[str]:
    return [name for name in map(_name, node.bases if node else ()) if name in trivium_errors()]


def _is_empty(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == ""


RULES: list[Rule] = [
    forbidden_imports,
    forbidden_paths,
    ray_outside_its_packages,
    slow_imports,
    only_one_module_imports_every_package,
    import_cycles,
    package_cycles,
    root_modules,
    repeated_basenames,
    format_skips,
    swallowed_exceptions,
    prints,
    unread_config_fields,
    pickles,
    incomplete_errors,
    unguarded_linux,
]


# --------------------------------------------------------------------------- the package


@pytest.fixture(scope="module", autouse=True)
def no_search_for_cycles() -> Generator[None]:
    """Syntax trees have none. Searching for them takes two thirds of the time that parsing takes."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: Rule) -> None:
    assert rule(PRODUCT) == []


def test_tests_of_errors_compare_no_sentences() -> None:
    assert len(trivium_errors()) > 20
    assert frozen_sentences(package(Path(__file__).parent)) == []


def test_the_command_line_starts_without_what_only_a_config_needs() -> None:
    heavy = {"torch", "transformers", "ray", "numpy", "pydantic", "httpx", "fastapi"}
    code = f"import sys, trivium.cli; print(sorted({heavy} & {{*sys.modules}}))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.strip() == "[]"


def modules_after(commands: list[list[str]], heavy: set[str]) -> dict[str, list[str]]:
    """Runs commands one after the other in a process. Returns the modules of `heavy` that are imported after each."""
    code = f"""import sys, trivium.cli as cli
for words in {commands!r}:
    try:
        cli.app(words)
    except SystemExit as end:
        code = end.code
    print("AFTER", repr((" ".join(words[:2]), code, sorted({heavy!r} & {{*sys.modules}}))))"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    lines = [line.removeprefix("AFTER ") for line in ran.stdout.splitlines() if line.startswith("AFTER ")]
    after = [ast.literal_eval(line) for line in lines]
    assert len(after) == len(commands), ran.stderr
    assert [command for command, code, _ in after if code and command.startswith("check")] == [], ran.stderr
    return {command: found for command, _, found in after}


def test_checking_a_config_imports_only_what_it_uses() -> None:
    heavy = {"ray", "vllm", "fastapi", "peft", "sqlalchemy", "pyarrow", "wandb", "mlflow", "httpx"}
    heavy |= {"trivium.cluster", "trivium.frontdoors"}
    recipe = str(Path(__file__).parents[1] / "recipes" / "arithmetic.yaml")
    assert modules_after([["check", recipe]], heavy) == {f"check {recipe}": []}


def test_commands_that_need_no_model_import_neither_torch_nor_transformers(tmp_path: Path) -> None:
    """torch and transformers take several times as long to import as all that these commands do."""
    run = tmp_path / "run"
    shutil.copytree(Path(__file__).parents[1] / "tests" / "data" / "healthy", run)
    tiny_tokenizer().save_pretrained(run / "model")
    (run / "config.yaml").write_text("model: {kind: tiny}\n")
    commands = [["doctor", str(run)], ["rollouts", str(run)]]
    after = modules_after(commands, {"torch", "transformers"})
    assert {command: found for command, found in after.items() if found} == {}


def test_unit_tests_are_in_the_folder_of_their_package() -> None:
    unit, doors = Path(__file__).parent / "unit", Path(__file__).parent / "doors"
    packages = {str(path.parent.relative_to(PRODUCT_ROOT)) for path in PRODUCT_ROOT.rglob("__init__.py")}
    folders = {str(test.parent.relative_to(unit)) for test in unit.rglob("test_*.py")} - {".", "tools"}
    assert folders <= packages - {"frontdoors"}
    of_doors = {str(test.parent.relative_to(doors)) for test in doors.rglob("test_*.py")} - {".", "e2e"}
    assert {f"frontdoors/{door}" for door in of_doors} <= packages


def test_the_makefile_runs_with_what_macos_has() -> None:
    """GNU make 3.81, a shell without bash's extensions, and the options of BSD's commands."""
    text = (PRODUCT_ROOT.parent / "Makefile").read_text()
    newer = r"\.ONESHELL|\.SHELLFLAGS|\$\((file|let|intcmp) |^[A-Z_]+ *!=|&:|^SHELL *[:?]?="  # make 3.82 to 4.4
    bash = r"\[\[|\|&|&>|<<<|\bmapfile\b|\bdeclare\b|\$\$\{\w+(,,|\^\^|@)|\bsource "
    gnu = r"\bnproc\b|\breadlink -f|\bsed -i|\bgrep -P|\bdate -d|\bcp --|\bstat -c|\bxargs -r"
    pattern = re.compile(f"{newer}|{bash}|{gnu}", re.MULTILINE)
    assert pattern.findall(text) == []
    for wrong in (".ONESHELL:", "N != nproc", "x:\n\t[[ -f a ]]", "x:\n\tsed -i s/a/b/ c", "x:\n\techo $${A,,}"):
        assert pattern.search(wrong), wrong


def test_every_exception_to_a_rule_is_still_needed() -> None:
    names = {module.name: module for module in PRODUCT}
    assert MAY_PRINT | set(MAY_CATCH_EVERYTHING) <= set(names)
    basenames = Counter(name.rpartition(".")[2] for name in names)
    assert [name for name in SAME_BASENAME if basenames[name] < 2] == []
    assert {*all_package_cycles(PRODUCT)} == PACKAGE_CYCLES
    used = {(module, name) for module, name in GUARDED if name in names[f"trivium.{module}"].source}
    assert used == {*GUARDED}
    for module, target in LAZY_IMPORTS:
        assert target in {item.target for item in names[module].imports}, f"{module} no longer imports {target}"


# --------------------------------------------------------------------------- the rules themselves

BAD: list[tuple[Rule, dict[str, str], str]] = [
    (forbidden_imports, {"types.py": "import torch"}, "core imports torch"),
    (forbidden_imports, {"types.py": "def f():\n    import ray"}, "core imports ray"),
    (forbidden_imports, {"types.py": "from safetensors.torch import save"}, "core imports safetensors.torch"),
    (
        forbidden_imports,
        {"loops.py": "from trivium.engines.torch.engine import X", "engines/torch/engine.py": ""},
        "core imports package",
    ),
    (forbidden_imports, {"loops.py": "from trivium.models import load", "models/load.py": ""}, "core imports package"),
    (forbidden_imports, {"loops.py": "from .cli import main", "cli.py": ""}, "core imports shell"),
    (forbidden_imports, {"engines/a.py": "import trivium.training.b", "training/b.py": ""}, "package imports package"),
    (forbidden_imports, {"engines/a.py": "from ..training import b", "training/b.py": ""}, "package imports package"),
    (
        forbidden_imports,
        {"models/a.py": "from trivium.engines import b", "engines/b.py": ""},
        "package imports package",
    ),
    (
        forbidden_imports,
        {"engines/a.py": "def f():\n    from trivium import cli", "cli.py": ""},
        "package imports shell",
    ),
    (
        forbidden_imports,
        {"cluster/a.py": "from trivium.frontdoors import verl", "frontdoors/verl.py": ""},
        "shell imports shell trivium.frontdoors.verl",
    ),
    (forbidden_imports, {"helpers/a.py": ""}, "not in the layout"),
    (
        forbidden_paths,
        {"foundation/registry.py": "X = {'a': {'b': 'trivium.frontdoors.verl:C'}}", "frontdoors/verl.py": ""},
        "trivium.foundation.registry: core names shell trivium.frontdoors.verl",
    ),
    (forbidden_paths, {"loops.py": "f('trivium.engines.a:B')", "engines/a.py": ""}, "core names package"),
    (forbidden_paths, {"engines/a.py": "run('python -m trivium.training.b')", "training/b.py": ""}, "names package"),
    (forbidden_paths, {"runtime/a.py": "x = f'trivium.frontdoors.c:{b}'", "frontdoors/c.py": ""}, "names shell"),
    (ray_outside_its_packages, {"runtime/a.py": "def f():\n    from ray.util import x"}, "trivium.runtime.a:2"),
    (slow_imports, {"models/a.py": "from transformers import AutoModel"}, "trivium.models.a:1"),
    (slow_imports, {"training/a.py": "class A:\n    import torch.distributed.fsdp"}, "trivium.training.a:2"),
    (
        only_one_module_imports_every_package,
        {"cli.py": "\n".join(f"import trivium.{name}" for name in sorted(PACKAGES))},
        "trivium.cli imports",
    ),
    (
        import_cycles,
        {"a.py": "import trivium.b", "b.py": "from trivium import a"},
        "trivium.a, trivium.b",
    ),
    (import_cycles, {"a.py": "from trivium.b import x", "b.py": "def f():\n    import trivium.a"}, "trivium.b"),
    (import_cycles, {"a.py": "import trivium.b", "b.py": "if TYPE_CHECKING:\n    import trivium.a"}, "trivium.b"),
    (
        package_cycles,
        {
            "serving/a.py": "def f():\n    import trivium.cluster.b",
            "cluster/b.py": "",
            "cluster/c.py": "if TYPE_CHECKING:\n    import trivium.testing.d",
            "testing/d.py": "from trivium.serving import e",
            "serving/e.py": "",
        },
        "cluster, serving, testing",
    ),
    (root_modules, {f"m{i}.py": "" for i in range(12)}, "13 modules at the root"),
    (repeated_basenames, {"a/c.py": "", "b/c.py": ""}, "trivium.a.c, trivium.b.c"),
    (format_skips, {"a.py": "x = [1,\n     2]  # fmt: skip"}, "trivium.a:2"),
    (format_skips, {"a.py": "# fmt: off\nx = {}"}, "trivium.a:1"),
    (swallowed_exceptions, {"a.py": "try:\n    f()\nexcept Exception:\n    log()"}, "a:3"),
    (swallowed_exceptions, {"a.py": "try:\n    f()\nexcept:\n    pass"}, "a:3"),
    (swallowed_exceptions, {"a.py": "try:\n    f()\nexcept (OSError, BaseException) as e:\n    print(e)"}, "a:3"),
    (swallowed_exceptions, {"a.py": "with suppress(Exception):\n    f()"}, "a:1"),
    (swallowed_exceptions, {"a.py": "try:\n    f()\nexcept Exception as e:\n    x.set_exception(y)"}, "a:3"),
    (prints, {"engines/a.py": "def f():\n    print(1)"}, "engines.a:2"),
    (unguarded_linux, {"a.py": "import os\n\nn = len(os.sched_getaffinity(0))"}, "a:3: sched_getaffinity"),
    (unguarded_linux, {"a.py": "Path(f'/proc/{pid}/stat').read_text()"}, "a:1: /proc/"),
    (unguarded_linux, {"foundation/concurrency.py": "os.sched_getaffinity(0)"}, "concurrency:1: sched_getaffinity"),
    (unread_config_fields, {"a.py": "class A:\n    class Config(Plugin):\n        speed: int = 1"}, "Config.speed"),
    (unread_config_fields, {"a.py": "class B(A.Config):\n    speed: int = 1\nx.speed = 2"}, "B.speed"),
    (pickles, {"a.py": "import pickle"}, "imports pickle"),
    (pickles, {"a.py": "from dill import loads"}, "imports dill"),
    (pickles, {"a.py": "torch.save(x, y)"}, "torch.save"),
    (pickles, {"a.py": "from torch import load"}, "torch.load"),
    (pickles, {"a.py": "np.load(x, allow_pickle=True)"}, "allow_pickle"),
    (incomplete_errors, {"a.py": "raise DataError('read a file', str(error))"}, "a:1"),
    (incomplete_errors, {"a.py": "raise errors.ConfigError('a key', '', 'leave it out')"}, "a:1"),
    (incomplete_errors, {"a.py": "class RolloutError(TriviumError): ...\n\nraise RolloutError('a rollout')"}, "a:3"),
    (frozen_sentences, {"a.py": "raises(DataError, match='no such key here')"}, "a:1"),
    (frozen_sentences, {"a.py": "raises((OSError, RoleFailed), match=rf'{x} failed: it was gone')"}, "a:1"),
    (frozen_sentences, {"a.py": "refused(ConfigError, 'train.lr', 'it is too large')"}, "a:1"),
    (frozen_sentences, {"a.py": "check_error(caught[0], ConfigError, 'it is too large')"}, "a:1"),
]

GOOD: list[tuple[Rule, dict[str, str]]] = [
    (forbidden_imports, {"types.py": "import json\nimport numpy.typing\nfrom safetensors.numpy import save"}),
    (
        forbidden_imports,
        {
            "engines/a.py": "import torch\nfrom trivium.models import b\nimport trivium.types",
            "models/b.py": "",
            "types.py": "",
            "engines/c.py": "from trivium.engines import a",
        },
    ),
    (
        forbidden_imports,
        {"cli.py": "import trivium.runtime.a", "runtime/a.py": "import trivium.sync.a", "sync/a.py": ""},
    ),
    (
        forbidden_paths,
        {
            "foundation/registry.py": "X = {'a': {'b': 'trivium.engines.a:C'}}",
            "engines/a.py": "'''As `trivium.cli` does.'''\nrun('trivium.engines.a')",
            "loops.py": "x = 'trivium.keys_of_other_trainers'",
            "cli.py": "f('trivium.frontdoors.d')",
            "frontdoors/d.py": "",
        },
    ),
    (ray_outside_its_packages, {"cluster/a.py": "import ray", "frontdoors/verl/b.py": "import ray"}),
    (
        slow_imports,
        {
            "a.py": "if TYPE_CHECKING:\n    import transformers\ndef f():\n    from transformers import AutoModel",
            "b.py": "import torch\nfrom transformers.pytorch_utils import Conv1D",
        },
    ),
    (import_cycles, {"a.py": "import trivium.b", "b.py": "import trivium.c", "c.py": ""}),
    (
        package_cycles,
        {
            "serving/a.py": "import trivium.cluster.b\nimport trivium.loops",
            "cluster/b.py": "",
            "loops.py": "import trivium.types.d",
            "types/d.py": "",
            "types/c.py": "import trivium.loops",
        },
    ),
    (root_modules, {f"m{i}.py": "" for i in range(11)}),
    (repeated_basenames, {"a/memory.py": "", "b/memory.py": ""}),
    (format_skips, {"a.py": "x = 1  # the format of a file"}),
    (swallowed_exceptions, {"a.py": "try:\n    f()\nexcept Exception as e:\n    raise Other from e"}),
    (swallowed_exceptions, {"a.py": "try:\n    f()\nexcept BaseException as e:\n    future.set_exception(e)"}),
    (swallowed_exceptions, {"a.py": "try:\n    f()\nexcept OSError:\n    pass"}),
    (prints, {"cli.py": "print(1)"}),
    (unguarded_linux, {"a.py": '"""Reads /proc/self."""\nos.cpu_count()', "b.py": '"""/dev/shm is memory."""'}),
    (
        unguarded_linux,
        {"foundation/concurrency.py": 'if hasattr(os, "sched_getaffinity"):\n    os.sched_getaffinity(0)'},
    ),
    (unread_config_fields, {"a.py": "class A:\n    class Config(Plugin):\n        speed: int = 1\n\nconfig.speed"}),
    (pickles, {"a.py": "model.save(x)\njson.load(y)"}),
    (incomplete_errors, {"a.py": "raise DataError(asked, f'{x}', do='write it again')\nraise DataError(*parts)"}),
    (
        incomplete_errors,
        {"a.py": "class RoleFailed(TriviumError):\n    def __init__(self, role): ...\n\nraise RoleFailed('trainer')"},
    ),
    (frozen_sentences, {"a.py": "raises(OSError, match='no space is left')\nraises(DataError, match='too large')"}),
    (frozen_sentences, {"a.py": "refused(DataError, 'pip install trivium[x]', f'version {v} of', 'a, b, c+')"}),
]


def bad_package(root: Path, files: dict[str, str]) -> list[Module]:
    for name, text in {"__init__.py": "", **files}.items():
        path = root / "trivium" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if path.parent.name != "trivium":
            (path.parent / "__init__.py").touch()
    return package(root / "trivium")


@pytest.mark.parametrize(("rule", "files", "message"), BAD)
def test_a_rule_detects_what_it_is_for(rule: Rule, files: dict[str, str], message: str, tmp_path: Path) -> None:
    assert message in "\n".join(rule(bad_package(tmp_path, files)))


@pytest.mark.parametrize(("rule", "files"), GOOD)
def test_a_rule_leaves_good_code_alone(rule: Rule, files: dict[str, str], tmp_path: Path) -> None:
    assert rule(bad_package(tmp_path, files)) == []
