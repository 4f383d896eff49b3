"""Prints figures of the code's structure: size, import cycles, long functions, call depth, duplicates, types.

    python tools/house.py [--json] [--frames] [--test-seconds N] [--compare OTHER_TREE]

They are read from the syntax trees of the checkout that this file stands in, but for the call depth (`--frames`), which
is measured in four short trainings.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from call_chain import WAYS, Chain, measured_chain
from import_graph import Module, import_cycles, import_graph, package

LONG_FUNCTION, LONG_MODULE = 60, 500
SMALLEST_DUPLICATE = 6
"""Statements."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Figures = dict[str, int | str]


def figures(tree: Path) -> tuple[Figures, dict[str, Any]]:
    """The table of a checkout, and what stands behind it: the members of cycles, the duplicates, what is too long."""
    modules = package(tree / "trivium")
    lines = {module.name: len(module.source.splitlines()) for module in modules}
    named = [(f"{module.name}.{name}", node) for module in modules for name, node in functions(module.tree)]
    lengths = {name: (node.end_lineno or node.lineno) - node.lineno + 1 for name, node in named}
    longest = max(lengths, key=lambda name: lengths[name])
    cycles = import_cycles(import_graph(modules))
    duplicates = duplicate_shapes(named)
    signatures = [[*signature_types(node)] for _, node in named]
    annotations = [*chain(*signatures)]
    by_name = {
        "module basenames used twice": repeated_basenames(modules),
        "names defined twice": repeated_names(modules),
    }
    table: Figures = {
        "modules at the package root": len([*(tree / "trivium").glob("*.py")]),
        "modules": len(modules),
        "product lines": sum(lines.values()),
        **{f"  {name}": count for name, count in lines_by_package(modules).items()},
        "test lines": sum(len(path.read_text("utf-8").splitlines()) for path in (tree / "tests").rglob("*.py")),
        "longest function": f"{longest} ({lengths[longest]})",
        f"functions over {LONG_FUNCTION} lines": sum(length > LONG_FUNCTION for length in lengths.values()),
        f"modules over {LONG_MODULE} lines": sum(count > LONG_MODULE for count in lines.values()),
        "import cycles": len(cycles),
        "modules in import cycles": sum(map(len, cycles)),
        "config fields": sum(1 for _ in config_fields(modules)),
        f"duplicate shapes of {SMALLEST_DUPLICATE} statements or more (pairs)": sum(
            len(names) * (len(names) - 1) // 2 for names in duplicates
        ),
        **{label: len(names) for label, names in by_name.items()},
        "functions with a parameter or result that is Any": sum("Any" in types for types in signatures),
        "parameters and results that mention Any": sum(bool(re.search(r"\bAny\b", text)) for text in annotations),
        "parameters and results that are Any": annotations.count("Any"),
        "fmt: skip, product": format_skips(tree / "trivium"),
        "fmt: skip, tests": format_skips(tree / "tests"),
    }
    details = {
        "import cycles": cycles,
        "duplicate shapes": duplicates,
        **by_name,
        f"functions over {LONG_FUNCTION} lines": {n: v for n, v in lengths.items() if v > LONG_FUNCTION},
        f"modules over {LONG_MODULE} lines": {name: count for name, count in lines.items() if count > LONG_MODULE},
    }
    return table, details


def lines_by_package(modules: Iterable[Module]) -> dict[str, int]:
    """Lines by the first folder below the root; modules of the root together as `(root)`."""
    total: Counter[str] = Counter()
    for module in modules:
        folders = len(module.path.relative_to(module.root).parts) - 1
        total[module.name.split(".")[1] if folders else "(root)"] += len(module.source.splitlines())
    return dict(sorted(total.items()))


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Every function and method below a node, nested ones too, with its qualified name."""
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, Function | ast.ClassDef)
        name = f"{prefix}{child.name}" if named else prefix
        if isinstance(child, Function):
            yield name, child
        yield from functions(child, f"{name}." if named else prefix)


def signature_types(function: Function) -> Iterator[str]:
    """The annotations of a function's parameters and of what it returns."""
    arguments = function.args
    others = [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *others):
        if argument.annotation is not None:
            yield ast.unparse(argument.annotation)
    if function.returns is not None:
        yield ast.unparse(function.returns)


def config_fields(modules: Iterable[Module]) -> Iterator[str]:
    """The public fields of the class `Config` and of every class that derives from it, by the names of the bases."""
    classes = [node for module in modules for node in module.nodes if isinstance(node, ast.ClassDef)]
    sections, before = {"BaseConfig", "Config"}, 0
    while len(sections) > before:
        before = len(sections)
        sections |= {node.name for node in classes if sections & {ast.unparse(b).split(".")[-1] for b in node.bases}}
    for node in classes:
        declared = [field for field in node.body if isinstance(field, ast.AnnAssign) and node.name in sections]
        fields = {ast.unparse(field.target): ast.unparse(field.annotation) for field in declared}
        yield from (f"{node.name}.{n}" for n, t in fields.items() if not n.startswith("_") and "ClassVar" not in t)


def duplicate_shapes(named: Iterable[tuple[str, Function]]) -> list[list[str]]:
    """Functions of `SMALLEST_DUPLICATE` statements or more that are equal but for identifiers and constants."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name, node in named:
        body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
        if sum(isinstance(inner, ast.stmt) for each in body for inner in ast.walk(each)) >= SMALLEST_DUPLICATE:
            groups[f"{shape(node.args)} {shape(body)}"].append(name)
    return sorted(sorted(names) for names in groups.values() if len(names) > 1)


def repeated_basenames(modules: Iterable[Module]) -> dict[str, list[str]]:
    """Modules that have the same last name."""
    return repeated((module.name.rpartition(".")[2], module.name) for module in modules)


def repeated_names(modules: Iterable[Module]) -> dict[str, list[str]]:
    """Public classes and functions of the same name that several modules define at their top level."""
    return repeated(
        (node.name, module.name)
        for module in modules
        for node in module.tree.body
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_")
    )


def repeated(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The keys that come with several values."""
    values: defaultdict[str, set[str]] = defaultdict(set)
    for key, value in pairs:
        values[key].add(value)
    return {key: sorted(several) for key, several in sorted(values.items()) if len(several) > 1}


def shape(node: Any) -> str:
    """A syntax tree without identifiers, constants and annotations."""
    if isinstance(node, list):
        return f"[{' '.join(map(shape, node))}]"
    if not isinstance(node, ast.AST):
        return "_"
    fields = [shape(value) for name, value in ast.iter_fields(node) if name not in ("annotation", "returns")]
    return f"{type(node).__name__}({' '.join(fields)})"


def format_skips(root: Path) -> int:
    return sum(len(re.findall(r"# fmt: skip$", path.read_text("utf-8"), re.MULTILINE)) for path in root.rglob("*.py"))


def measured(tree: Path, seconds: float | None, *, frames: bool) -> tuple[Figures, dict[str, Any]]:
    """The table and what stands behind it, with the call depth if it is to be measured."""
    table, details = figures(tree)
    details["frames"] = {way: measured_chain(tree, way) for way in WAYS} if frames else {}
    for way in WAYS:
        depth = depth_of(details["frames"][way]) if frames else "make house HOUSE_ARGS=--frames"
        table[f"frames to optimizer.step, {way}"] = depth
    table["test time in seconds"] = "--test-seconds N, of make test-all" if seconds is None else f"{seconds:.0f}"
    return table, details


def depth_of(processes: Chain) -> int:
    return sum(map(len, processes))


def table_text(tables: Mapping[str, Figures]) -> str:
    """Tables side by side, each under its title."""
    names = dict.fromkeys(chain(*tables.values()))
    columns = [["", *names]] + [[title, *(str(t.get(n, "-")) for n in names)] for title, t in tables.items()]
    widths = [max(map(len, column)) for column in columns]
    first, *others = [[cell.ljust(w) for cell in column] for column, w in zip(columns, widths, strict=True)]
    return "\n".join("  ".join(row).rstrip() for row in zip(first, *others, strict=True))


def details_text(details: dict[str, Any]) -> str:
    """The members of import cycles, and the call chains where they were measured."""
    lines = [f"import cycle of {len(cycle)}: {', '.join(cycle)}" for cycle in details["import cycles"]]
    for way, processes in details["frames"].items():
        lines.append(f"frames to optimizer.step, {way}: {depth_of(processes)}")
        for number, names in enumerate(processes, start=1):
            lines += [f"  in process {number}:", *(f"    {name}" for name in names)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Figures of the code's structure.")
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    parser.add_argument("--frames", action="store_true", help="measure the call depth too, in four short trainings")
    parser.add_argument(
        "--compare", type=Path, metavar="OTHER_TREE", help="another checkout, shown as the state before"
    )
    parser.add_argument(
        "--test-seconds", type=float, nargs="+", default=[], metavar="N", help="seconds of `make test-all`, by column"
    )
    arguments = parser.parse_args()
    here = Path(__file__).parents[1]
    trees = {"before": arguments.compare, "after": here} if arguments.compare else {"now": here}
    given: list[float | None] = [*arguments.test_seconds, None, None]
    columns = {
        title: measured(tree, seconds, frames=arguments.frames)
        for (title, tree), seconds in zip(trees.items(), given, strict=False)
    }
    if arguments.json:
        print(json.dumps({title: {"table": table, **more} for title, (table, more) in columns.items()}, indent=1))
        return
    print(table_text({title: table for title, (table, _) in columns.items()}))
    for title, (_, details) in columns.items():
        print(f"\n{title}\n{details_text(details)}")


if __name__ == "__main__":
    main()
