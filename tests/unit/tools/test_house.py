"""The figures of the code's structure, on small packages made for each test."""

from __future__ import annotations

from pathlib import Path

import pytest
from call_chain import longest_chain
from house import (
    duplicate_shapes,
    figures,
    functions,
    lines_by_package,
)
from import_graph import Module, import_cycles, import_graph, package


def made(folder: Path, files: dict[str, str]) -> list[Module]:
    """The modules of a package with these files."""
    for name, text in {"trivium/__init__.py": "", **{f"trivium/{name}": text for name, text in files.items()}}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        (path.parent / "__init__.py").touch()
    return package(folder / "trivium")


@pytest.mark.parametrize(
    ("text", "target", "kind"),
    [
        ("import trivium.b", "trivium.b", "module"),
        ("from trivium.p import c", "trivium.p.c", "module"),
        ("from trivium.p import something", "trivium.p", "module"),
        ("from trivium.p.c import something", "trivium.p.c", "module"),
        ("from . import b", "trivium.b", "module"),
        ("from .p.c import something", "trivium.p.c", "module"),
        ("class A:\n    def f(self):\n        if 1:\n            import trivium.b", "trivium.b", "function"),
        ("if TYPE_CHECKING:\n    from trivium.b import X", "trivium.b", "type"),
        ("if typing.TYPE_CHECKING:\n    pass\nelse:\n    import trivium.b", "trivium.b", "module"),
    ],
)
def test_every_kind_of_import_is_an_edge(text: str, target: str, kind: str, tmp_path: Path) -> None:
    modules = made(tmp_path, {"a.py": text, "b.py": "", "p/c.py": ""})
    imports = next(module.imports for module in modules if module.name == "trivium.a")
    assert [(item.target, item.kind) for item in imports] == [(target, kind)]
    assert import_graph(modules)["trivium.a"] == {target}


def test_cycles_are_components_and_count_type_only_and_function_level_imports(tmp_path: Path) -> None:
    modules = made(
        tmp_path,
        {
            "a.py": "import trivium.b",
            "b.py": "def f():\n    import trivium.c",
            "c.py": "if TYPE_CHECKING:\n    import trivium.a\nimport trivium.d",
            "d.py": "import trivium.e",
            "e.py": "import trivium.d\nimport json",
            "f.py": "import trivium.a",
        },
    )
    assert import_cycles(import_graph(modules)) == [
        ["trivium.a", "trivium.b", "trivium.c"],
        ["trivium.d", "trivium.e"],
    ]


def test_duplicates_are_equal_but_for_names_constants_and_annotations(tmp_path: Path) -> None:
    one = "def f(a: int):\n 'Doc.'\n x = a.b\n y = 1\n for z in x:\n  y += z\n  g(y)\n return y"
    other = one.replace("f(a: int)", "method(self)").replace("a.b", "self.c").replace("'Doc.'", "''").replace("1", "7")
    different = one.replace("+=", "-=").replace("f(", "g(")
    short = "def h(a):\n    return a"
    modules = made(tmp_path, {"a.py": f"{one}\n{different}\n{short}\n", "b.py": f"{other}\n{short}\n"})
    named = [(f"{module.name}.{name}", node) for module in modules for name, node in functions(module.tree)]
    assert duplicate_shapes(named) == [["trivium.a.f", "trivium.b.method"]]


def test_the_table_counts_lines_types_and_comments(tmp_path: Path) -> None:
    skip = "x = 1  # fmt: " + "skip"
    long = "def long(a: dict[str, Any], *b: Any) -> Any:\n" + "    a\n" * 61
    modules = made(tmp_path, {"a.py": f"{skip}\n{long}", "p/b.py": "import trivium.a\n" * 501})
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(f"{skip}\n'# fmt: skip in a string'\n")
    table, details = figures(tmp_path)
    assert lines_by_package(modules) == {"(root)": 63, "p": 501}
    assert (table["product lines"], table["test lines"], table["fmt: skip, tests"]) == (564, 2, 1)
    assert table["longest function"] == "trivium.a.long (62)"
    assert (table["parameters and results that mention Any"], table["parameters and results that are Any"]) == (3, 2)
    assert details["modules over 500 lines"] == {"trivium.p.b": 501}


def test_a_chain_goes_on_with_the_call_that_started_the_actors_method() -> None:
    command = {"called": ["trainer", "run"], "actor": None, "time": 1.0, "chain": ["m", "trivium.cli.run", "work"]}
    rank = {"called": ["rank", "call"], "actor": "trainer", "time": 2.0, "chain": ["Worker.run", "update"]}
    other = {"called": ["rank", "live"], "actor": "trainer", "time": 3.0, "chain": ["Worker.run", "watch"]}
    later = {"called": ["rank", "call"], "actor": "trainer", "time": 5.0, "chain": ["Worker.run", "save"]}
    step = {"called": None, "actor": "rank", "time": 4.0, "chain": ["Rank.call", "Optimizer.step"]}
    assert longest_chain([later, step, other, rank, command]) == [
        ["trivium.cli.run", "work"],
        ["Worker.run", "update"],
        ["Rank.call", "Optimizer.step"],
    ]
    with pytest.raises(LookupError, match="no recorded call started it"):
        longest_chain([command, step])
