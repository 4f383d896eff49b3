"""Writes docs/{algorithms,api,config,metrics,mistakes}.md, and the tables of other pages, from the code."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from algorithms_page import algorithms_page
from api_page import api_page
from mistakes import mistakes_page
from page_tables import TABLES
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from types_in_words import type_of

from trivium.config import (
    AlgorithmConfig,
    BufferConfig,
    CurriculumConfig,
    EngineConfig,
    Plugin,
    RewardConfig,
    RunConfig,
    StrategyConfig,
    TrainConfig,
    WorkflowConfig,
)
from trivium.foundation.metrics import METRICS
from trivium.foundation.registry import CATALOGUE, resolve
from trivium.frontdoors.verl.objects import validation

DOCS = Path(__file__).parents[1] / "docs"

KINDS: dict[str, tuple[str, type[Plugin]]] = {
    "model": ("models", Plugin),
    "tasks": ("tasks", Plugin),
    "workflow": ("workflows", WorkflowConfig),
    "rewards": ("rewards", RewardConfig),
    "engine": ("engines", EngineConfig),
    "algorithm": ("algorithms", AlgorithmConfig),
    "train": ("train", TrainConfig),
    "buffer": ("buffers", BufferConfig),
    "monitors": ("monitors", Plugin),
}
"""Where a config names a plugin: its kind in the catalogue, and the fields that every plugin of this kind has."""

INNER: dict[str, dict[str, tuple[str, type[Plugin]]]] = {
    "schedule": {"schedule.curriculum": ("curricula", CurriculumConfig)},
    "buffer": {
        "buffer.strategy": ("sample_strategies", StrategyConfig),
        "buffer.operators[]": ("operators", Plugin),
    },
}
"""Plugins that are named inside the section of another."""

MANY = {
    "tasks": "tasks.<name>",
    "rewards": "rewards[]",
    "monitors": "monitors[]",
}
"""How a key of a section that holds several plugins is written."""

CONFIG_HEAD = """# The config

Generated from the code by `make docs`. A config is YAML; `extends: base.yaml` lays a file over another, and
`section.field=value` on the command line lays a value over both. Unknown keys are errors. A section with a `kind` names
the class that owns its fields: a name listed here, `package.module:Name`, or `file.py:Name` beside the config file.

*Resume* says whether a continued run may change the field: `free` if it may, `same` if a change needs a new `run.dir`.
"""

METRICS_HEAD = """# Metrics

Generated from the code by `make docs`. Every key in `metrics.jsonl` is declared here; `*` stands for a name of yours (a
reward component, a taskset, an objective). *Over* says how several values become the one that is logged. Two runs of
one config agree on everything outside `time/` and `perf/`. `val-core` and `val-aux` are of validations by
[RayPPOTrainer](ray-ppo-trainer.md).
"""


def config_page() -> str:
    """docs/config.md."""
    parts = [CONFIG_HEAD]
    for name, field in RunConfig.model_fields.items():
        parts.append(f"## {name}\n")
        owner = field.annotation
        if name in KINDS:
            parts += [_paragraph(field.description), *_plugins(*KINDS[name], MANY.get(name, name))]
        elif _is_section(owner):
            parts += [_paragraph(owner.__doc__), _table(list(_rows(owner, name).values()))]  # pyright: ignore[reportArgumentType, reportOptionalMemberAccess]
        else:
            parts.append(_paragraph(field.description))
        for where, inner in INNER.get(name, {}).items():
            parts += [f"### {where}\n", *_plugins(*inner, where)]
    return "\n".join(part for part in parts if part)


def metrics_page() -> str:
    """docs/metrics.md."""
    assert validation  # imported for what it declares
    areas: dict[str, list[str]] = {}
    for key, metric in METRICS.items():
        row = f"| `{key}` | {_cell(metric.help)} | {metric.unit} | {metric.aggregation} | {metric.better} |"
        areas.setdefault(key.partition("/")[0], []).append(row)
    head = "| key | meaning | unit | over | better |\n|---|---|---|---|---|"
    return "\n".join(
        [METRICS_HEAD, *(f"## {area}\n\n{head}\n" + "\n".join(rows) + "\n" for area, rows in areas.items())]
    )


def _plugins(kind: str, base: type[Plugin], prefix: str) -> Iterator[str]:
    """The fields that all plugins of a kind share, then each plugin with its own; what two share is shown once."""
    seen: dict[str, str] = {}
    if len(base.model_fields) > 1:
        yield f"Every `{prefix}` section:\n"
        yield _table(list(_rows(base, prefix).values()))
        seen = dict.fromkeys(_rows(base, prefix).values(), "")
    if kind == "algorithms":
        yield "[Algorithms](algorithms.md) lists the presets, and the functions that a section can name.\n"
    for names in _alike(kind):
        first, target = names[0], resolve(kind, names[0])
        yield f"**{', '.join(f'`kind: {name}`' for name in names)}** {_about(target)}\n"
        rows = _rows(getattr(target, "Config", base), prefix)
        shared = [(key, seen[row]) for key, row in rows.items() if seen.get(row)]
        yield _table([row for row in rows.values() if row not in seen])
        for other in dict.fromkeys(name for _, name in shared):
            keys = [f"`{key.removeprefix(prefix + '.')}`" for key, name in shared if name == other]
            yield f"Keys as for `{other}`{'' if len(keys) == len(rows) else ': ' + ', '.join(keys)}.\n"
        seen = {**dict.fromkeys(rows.values(), first), **seen}


def _alike(kind: str) -> list[list[str]]:
    """The names of a kind, grouped: values of one class share its section."""
    groups: dict[object, list[str]] = {}
    for name in CATALOGUE[kind]:
        target = resolve(kind, name)
        groups.setdefault(name if isinstance(target, type) else target.Config, []).append(name)
    return list(groups.values())


def _about(target: Any) -> str:
    """What a class is for, by its docstring or that of its section."""
    described = target if isinstance(target, type) else target.Config
    return _cell((described.__doc__ or "").strip().split("\n\n")[0])


def _table(rows: list[str]) -> str:
    return (
        "\n".join(["| key | type | default | resume | meaning |", "|---|---|---|---|---|", *rows, ""]) if rows else ""
    )


def _rows(
    owner: type[BaseModel], prefix: str, resume: str = "same", default: BaseModel | None = None
) -> dict[str, str]:
    """Key -> row for each field, nested sections included, with the defaults that this place (`default`) gives them."""
    rows: dict[str, str] = {}
    for name, field in owner.model_fields.items():
        if name == "kind" and issubclass(owner, Plugin):
            continue
        extra = field.json_schema_extra
        field_resume = str(extra.get("resume", resume)) if isinstance(extra, dict) else resume
        here = getattr(default, name) if default is not None else field.get_default(call_default_factory=True)
        key = f"{prefix}.{name}"
        if _is_section(field.annotation):
            rows |= _rows(field.annotation, key, field_resume, here if isinstance(here, BaseModel) else None)  # pyright: ignore[reportArgumentType]
            continue
        rows[key] = _row(key, field, field_resume, here)
        values = get_args(field.annotation)[-1] if get_origin(field.annotation) is dict else None
        if _is_section(values):
            rows |= _rows(values, f"{key}.<name>", field_resume)
        optional = get_args(field.annotation) if get_origin(field.annotation) in (Union, types.UnionType) else ()
        for section in filter(_is_section, optional):
            rows |= _rows(section, key, field_resume)
    return rows


def _is_section(annotation: Any) -> bool:
    """A nested section that is no plugin."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel) and not issubclass(annotation, Plugin)


def _row(key: str, field: FieldInfo, resume: str, default: Any) -> str:
    shown = "required" if field.is_required() else f"`{_value(default)}`"
    kind = type_of(field)
    return f"| `{key}` | {kind} | {shown} | {resume} | {_cell(field.description)} |"


def _value(default: Any) -> str:
    if isinstance(default, Plugin):
        return default.kind
    if isinstance(default, tuple | list):
        return "[" + ", ".join(_value(item) for item in default) + "]"
    if default is None or isinstance(default, bool):
        return str({None: "null", True: "true", False: "false"}[default])
    return str(default) or '""'


def _paragraph(text: str | None) -> str:
    return " ".join((text or "").split()) + "\n" if text else ""


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


PAGES = {
    "algorithms.md": algorithms_page,
    "api.md": api_page,
    "config.md": config_page,
    "metrics.md": metrics_page,
    "mistakes.md": mistakes_page,
    **TABLES,
}

if __name__ == "__main__":
    DOCS.mkdir(exist_ok=True)
    for page, text in PAGES.items():
        (DOCS / page).write_text(text(), encoding="utf-8")
