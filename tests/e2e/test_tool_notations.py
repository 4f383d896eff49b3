"""Runs with tools whose chat template has a notation of its own, from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import Forked, commands
from trivium.text.tiny import TinyModel

DESCRIBES = """
{%- if tools %}<|system|>{{ tools | tojson }} To call one, write <tool_call>
<function=WHICH>
<parameter=NAME>
WHAT
</parameter>
</function>
</tool_call><|end|>{% endif %}
{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}CALLS<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
WRITES = (
    "{% for c in message.tool_calls %}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n"
    "</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
)
UNREAD = "{% for c in message.tool_calls %}CALL {{ c.function.name }}: {{ c.function.arguments }}{% endfor %}"
SCRIPT = '''
def reply(request, version):
    """Calls the tool as the template says, then answers with its result."""
    done = any(message.role == "tool" for message in request.messages)
    call = "<tool_call>\\n<function=height>\\n<parameter=peak>\\nTitlis\\n</parameter>\\n</function>\\n</tool_call>"
    return list(b"3238" if done else call.encode())


def height(peak: str) -> int:
    """The height of a mountain."""
    return {"Titlis": 3238}[peak]
'''
CONFIG = """
run: {dir: run}
model: {kind: hf, path: model, chat_template: chat.jinja}
tasks: {train: {kind: jsonl, path: rows.jsonl}}
workflow: {kind: tools, tools: ["script.py:height"], max_calls: 2}
rewards: [exact]
engine: {kind: scripted, script: "script.py:reply", sampling: {max_new_tokens: 128}}
schedule: {steps: 1, groups_per_step: 2, group_size: 2}
monitors: [jsonl]
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes the files of a run with this chat template."""
    sizes = TinyModel.Config(alphabet="bytes", layers=1, hidden=32, heads=2, mlp=32, max_position=2048)
    TinyModel(sizes, seed=0).materialize(tmp_path / "model")
    rows = [{"prompt": f"How high is Titlis{end}", "answer": "3238"} for end in "?!"]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "run.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)

    def write(calls: str) -> str:
        (tmp_path / "chat.jinja").write_text(DESCRIBES.replace("CALLS", calls))
        return "run.yaml"

    return write


def ended(start: Callable[..., Forked], code: int, *arguments: str) -> str:
    return start(arguments[0], *arguments).ended(code).text


@pytest.mark.parametrize("calls", ["", WRITES], ids=["described", "written"])
def test_the_call_that_the_template_asks_for_is_executed(
    calls: str, config: Callable[[str], str], tmp_path: Path
) -> None:
    with commands(tmp_path) as start:
        ended(start, 0, "check", config(calls))
        ended(start, 0, "run", config(calls))
        shown = ended(start, 0, "rollouts", "run", "--tools")
    assert 'height {"peak": "Titlis"}' in shown
    assert "reward 1" in shown
    row = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    assert (row["workflow/tool_calls"], row["workflow/tool_errors"]) == (1.0, 0.0)


def test_check_refuses_a_notation_that_no_format_reads_if_there_are_tools(
    config: Callable[[str], str], tmp_path: Path
) -> None:
    with commands(tmp_path) as start:
        text = ended(start, 2, "check", config(UNREAD))
        assert "model.tool_calls" in text
        assert "CALL find" in text
        assert "minimax" in text
        ended(start, 0, "check", config(UNREAD), "workflow={kind: single_turn}")
        ended(start, 0, "check", config(UNREAD), "model.tool_calls=xml")
        text = ended(start, 0, "check", config(WRITES), "model.tool_calls=hermes")
        assert "model.tool_calls" in text
        assert "<function=find" in text
