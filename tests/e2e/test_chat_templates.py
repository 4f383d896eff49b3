"""Whole runs with templates that ask for more than roles and contents: the day, the calls before results."""

from __future__ import annotations

import json
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from failing import refused

from trivium.config import config_from_mapping, merged
from trivium.foundation.errors import ConfigError
from trivium.runtime import run_dir
from trivium.runtime.launch import run
from trivium.text.tiny import TinyModel

EACH = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
OPENING = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
DATED = "<|system|>{{ strftime_now('%d %b %Y') }}<|end|>" + EACH + OPENING
NAMES_ITS_CALL = (
    "{% set last = namespace(name=none) %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if last.name is none %}{{ raise_exception('a result without a call') }}{% endif %}"
    "<|tool|>{{ last.name }}: {{ m.content }}<|end|>{% else %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{% set last.name = call.function.name %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|end|>{% endif %}{% endfor %}"
) + OPENING
"""Writes a result under the name of the call before it, and refuses one without."""
TOOLS = '''
def population(city: str) -> int:
    """How many people live in a city."""
    return {"Rome": 2746984}[city]
'''
SCRIPT = """
def reply(request, version):
    if any(message.role == "tool" for message in request.messages):
        return list(b"2746984")
    return list(b'<tool_call>\\n{"name": "population", "arguments": {"city": "Rome"}}\\n</tool_call>')
"""


class Clock(date):
    """A day that a test sets."""

    now = date(2026, 2, 27)

    @classmethod
    def today(cls) -> date:
        return cls.now


def configured(folder: Path, template: str, **sections: Any) -> Any:
    config = TinyModel.Config(alphabet="bytes", layers=1, hidden=32, heads=2, mlp=32, max_position=1024)
    path = TinyModel(config, seed=0).materialize(folder / "model")
    base = {
        "run": {"dir": str(folder / "run")},
        "model": {"kind": "hf", "path": str(path), "chat_template": template},
        "tasks": {"train": {"kind": "python", "source": "rows.py:rows"}},
        "rewards": ["exact"],
        "schedule": {"steps": 1, "groups_per_step": 2, "group_size": 2},
        "monitors": ["jsonl"],
        "cluster": {"threads": 1},
    }
    rows = [{"prompt": f"How many people live in Rome? {n}", "answer": "2746984"} for n in range(2)]
    (folder / "rows.py").write_text(f"def rows():\n    return {rows!r}\n")
    return config_from_mapping(merged(base, sections), folder)


def test_a_run_that_continues_on_another_day_has_the_weights_of_one_that_was_not_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_dir, "date", Clock)
    weights, prompts = {}, {}
    for name, days in {"whole": (4,), "in two": (2, 4)}.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "varied.py").write_text("def varied(completion):\n    return sum(map(ord, completion)) % 7 / 7\n")
        monkeypatch.setattr(Clock, "now", date(2026, 2, 27))
        for steps in days:
            sections: dict[str, Any] = {
                "rewards": ["varied.py:varied"],
                "schedule": {"steps": steps, "group_size": 4},
                "engine": {"sampling": {"max_new_tokens": 8}},
                "train": {"optimizer": {"lr": 1e-2}},
                "checkpoint": {"save_every": 2},
            }
            run(configured(folder, DATED, **sections))
            monkeypatch.setattr(Clock, "now", Clock.now + timedelta(days=1))
        weights[name] = (folder / "run" / "checkpoints" / "step-000004" / "policy" / "model.safetensors").read_bytes()
        prompts[name] = run_dir.as_saved(configured(folder, DATED)).run.date
    assert weights["whole"] == weights["in two"]
    assert set(prompts.values()) == {date(2026, 2, 27)}


def test_results_are_rendered_where_the_template_asks_for_their_calls(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "script.py").write_text(SCRIPT)
    sections: dict[str, Any] = {
        "workflow": {"kind": "tools", "tools": ["tools.py:population"], "max_calls": 2},
        "engine": {"kind": "scripted", "script": "script.py:reply", "sampling": {"max_new_tokens": 128}},
    }
    run(configured(tmp_path, NAMES_ITS_CALL, **sections))
    [metrics] = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][-1:]
    assert metrics["reward/mean"] == 1.0
    assert metrics["workflow/tool_calls"] == 1.0


@pytest.mark.parametrize("template", [EACH.replace("in messages", "in messages if m.role != 'tool'") + OPENING])
def test_check_refuses_a_template_that_drops_results(template: str, tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    workflow = {"kind": "tools", "tools": ["tools.py:population"]}
    with refused(ConfigError, "workflow.kind", "tool", "model.roles"):
        run(configured(tmp_path, template, workflow=workflow))
    assert not (tmp_path / "run" / "rollouts").exists()
