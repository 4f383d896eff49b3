"""Tables inside pages that are written by hand: between two comments, from the code."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from chat_matrix import CELLS, OUTCOMES
from transformers import Qwen3Config

from trivium.frontdoors.lightrft.arguments import OPTIONAL
from trivium.frontdoors.tables import Mapped
from trivium.frontdoors.trinity.config.config_table import AUXILIARY_MODEL, LORA, TABLE, TRAINER_CONFIG
from trivium.frontdoors.trinity.config.keys_of_data import EXPERIENCE_BUFFER, TASKSET
from trivium.frontdoors.trl import KEYS as TRL_KEYS
from trivium.frontdoors.verl.config.config_table import TABLE as VERL
from trivium.frontdoors.verl.key_hints import KEYS as VERL_KEYS
from trivium.models.backbone.shape import shape_of
from trivium.monitors.health import RULES
from trivium.planning.model_memory import Adapter, SplitModels, TrainedModels, engine_memory, memory_plan
from trivium.planning.model_shape import ModelShape

DOCS = Path(__file__).parents[1] / "docs"
_BEGIN, _END = "<!-- the table is generated: make docs -->\n", "<!-- end of the table -->\n"
_GIB = 2**30


def with_table(page: str, table: Callable[[], str]) -> str:
    """The page as it is, its table made anew."""
    before, _, rest = (DOCS / page).read_text(encoding="utf-8").partition(_BEGIN)
    return f"{before}{_BEGIN}\n{table()}\n{_END}{rest.partition(_END)[2]}"


def _keys() -> str:
    """The names of other trainers' config keys in Trivium."""
    rows = [f"| `{key}` | {_code(here)} |" for key, here in sorted({**VERL_KEYS, **TRL_KEYS}.items())]
    return "\n".join(["| other trainers | Trivium |", "|---|---|", *rows, ""])


def _code(here: str) -> str:
    """The key in code font, its description as text."""
    words = here.split(" ")
    return " ".join(f"`{word.rstrip(',:')}`{word[len(word.rstrip(',:')) :]}" if "." in word else word for word in words)


def _qwen3(hidden: int, layers: int, heads: int, mlp: int, *, tied: bool) -> ModelShape:
    width = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers, "vocab_size": 151936}
    attention = {"num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128}
    return shape_of(Qwen3Config(**width, **attention, tie_word_embeddings=tied))


def _memory() -> str:
    """GiB on the device of one training rank, and of one rollout engine."""
    models = {
        "Qwen3-0.6B": _qwen3(1024, 28, 16, 3072, tied=True),
        "Qwen3-1.7B": _qwen3(2048, 28, 16, 6144, tied=True),
        "Qwen3-4B": _qwen3(2560, 36, 32, 9728, tied=True),
        "Qwen3-8B": _qwen3(4096, 36, 32, 12288, tied=False),
    }
    head = "| model | all weights | with a reference | LoRA, rank 16 | each of 8 ranks | engine | its cache |"
    rows = [head, "|---|---|---|---|---|---|---|"]
    for name, shape in models.items():
        policy = TrainedModels(shape, dtype="bfloat16", gradient_checkpointing=True)
        beside = [policy, replace(policy, frozen={"reference": shape}), replace(policy, adapter=Adapter(16))]
        plans = [*(memory_plan(models, 8192) for models in beside), memory_plan(policy, 8192, SplitModels(shards=8))]
        engine = engine_memory(shape, dtype="bfloat16", rows=64, tokens=2048).values()
        sizes = [*(sum(plan.values()) for plan in plans), *engine]
        rows.append(f"| {name} | {' | '.join(f'{size / _GIB:.0f}' for size in sizes)} |")
    return "\n".join([*rows, ""])


def _trinity() -> str:
    """How every key of Trinity-RFT's config is translated; keys with equal entries share a row."""
    sections = {
        "The config": TABLE,
        "`buffer.explorer_input`: `taskset`, and each of `tasksets` and `eval_tasksets`": TASKSET,
        "`buffer.trainer_input`: `experience_buffer`, and each of `auxiliary_buffers`": EXPERIENCE_BUFFER,
        "`model.lora_configs`": LORA,
        "`explorer.auxiliary_models`": AUXILIARY_MODEL,
    }
    parts = [f"### {title}\n\n{_rows_of(table.rows())}" for title, table in sections.items()]
    taken = (row for row in TRAINER_CONFIG.rows() if isinstance(TRAINER_CONFIG.entries[row[0]], Mapped))
    return "\n".join([*parts, f"### `trainer.trainer_config`\n\n{_rows_of(taken)}"])


def _rows_of(rows: Iterator[tuple[str, str]]) -> str:
    keys: dict[str, list[str]] = {}
    for key, text in rows:
        keys.setdefault(text, []).append(f"`{key}`")
    lines = [f"| {', '.join(names)} | {text.replace('|', chr(92) + '|')} |" for text, names in keys.items()]
    return "\n".join(["| key | in Trivium |", "|---|---|", *lines, ""])


def _verl() -> str:
    """How every key of verl's config is translated; keys with equal entries share a row."""
    return _rows_of(VERL.rows())


def _doctor() -> str:
    """The rules of `trivium doctor`."""
    rows = [f"| {name} | {' '.join((rule.__doc__ or '').split())} |" for name, rule in RULES.by_name.items()]
    return "\n".join(["| rule | condition |", "|---|---|", *rows, ""])


def _lightrft() -> str:
    """The optional attributes of `args` of LightRFT's trainer."""
    rows = [f"| `{name}` | `{option.default!r}` | {option.what} |" for name, option in OPTIONAL.items()]
    return "\n".join(["| attribute | default | meaning |", "|---|---|---|", *rows, ""])


def _chat_templates() -> str:
    """What the renderer does with public chat templates, as tests/data/chat_templates.json has it."""
    rows: dict[str, Any] = json.loads(OUTCOMES.read_text(encoding="utf-8"))
    notes: dict[str, int] = {}
    lines = [f"| template | {' | '.join(CELLS)} |", "|---|" + "---|" * len(CELLS)]
    for name, row in rows.items():
        cells: list[str] = []
        for cell in CELLS:
            outcome, *more = row["cells"][cell]
            note = _note(*more) if more and outcome != "none" else ""
            mark = f" ({notes.setdefault(note, len(notes) + 1)})" if note else ""
            cells.append("–" if outcome == "none" else outcome + mark)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    numbered = [f"{number}. {note}" for note, number in notes.items()]
    formats = ["| template | `tool_calls: auto` is | a turn ends with |", "|---|---|---|"]
    for name, row in rows.items():
        ends = ", ".join(f"`{token.replace('|', chr(92) + '|')}`" for token in row["ends"])
        formats.append(f"| {name} | `{row['format']}` | {ends} |")
    return "\n".join([*lines, "", *numbered, "", *formats, ""])


def _note(refusal: str, roles: str = "") -> str:
    """The note of a cell: what a mapping needs, or what is refused."""
    told = " ".join(refusal.replace("|", "\\|").replace("<", "\\<").split())
    if not roles:
        return told
    return f"`{{{roles}}}`, without which {told}" if told else f"`{{{roles}}}`, the default"


TABLES = {
    "chat-templates.md": partial(with_table, "chat-templates.md", _chat_templates),
    "doctor.md": partial(with_table, "doctor.md", _doctor),
    "lightrft.md": partial(with_table, "lightrft.md", _lightrft),
    "trinity.md": partial(with_table, "trinity.md", _trinity),
    "coming-from.md": partial(with_table, "coming-from.md", _keys),
    "memory.md": partial(with_table, "memory.md", _memory),
    "ray-ppo-trainer.md": partial(with_table, "ray-ppo-trainer.md", _verl),
}
"""Pages with such a table."""
