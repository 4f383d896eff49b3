"""A calculator for a tiny model: products of two numbers that it does not learn to compute itself.

`calculate` is the tool. `products` gives the tasks of rollouts, `worked` the rows of supervised steps that teach the
form of a call and of an answer, `direct` those of a control. The chat template of `TinyModel` names the tools.
"""

import json
import random
import re
from typing import Any

from trivium import api


def calculate(e: str) -> int:
    """Computes a product of two numbers, such as 12*34."""
    factors = re.fullmatch(r"(\d+)\*(\d+)", e)
    if factors is None:
        raise ValueError("write a product, such as 12*34")
    return int(factors[1]) * int(factors[2])


def products(count: int, held_out: bool = False) -> list[dict[str, Any]]:
    """Tasks with different factors for training and for the evaluation."""
    rows = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(0).shuffle(rows)
    chosen = rows[:count] if held_out else rows[-count:]
    return [{"id": f"{a}*{b}", "prompt": f"{a}*{b}=", "answer": str(a * b)} for a, b in chosen]


def worked(count: int) -> list[dict[str, Any]]:
    """Rows with completions: the call of each product, and the answer after its result."""
    tools = {"role": "tools", "content": json.dumps([{"function": {"name": "calculate"}}])}
    rows: list[dict[str, Any]] = []
    for task in products(count):
        answer, call = task["answer"], json.dumps({"name": "calculate", "parameters": {"e": task["id"]}})
        question = [tools, {"role": "user", "content": task["prompt"]}]
        result = [{"role": "assistant", "content": call}, {"role": "tool", "content": answer}]
        rows.append({"id": f"{task['id']} call", "prompt": question, "completion": call, "answer": answer})
        rows.append({"id": task["id"], "prompt": [*question, *result], "completion": answer, "answer": answer})
    return rows


def direct(count: int) -> list[dict[str, Any]]:
    """Rows whose completion is the answer, for a control without the tool."""
    return [{**task, "completion": task["answer"]} for task in products(count)]


class TinyModel(api.TinyModel):
    """A tiny model whose chat template writes the names of the tools in front of the conversation."""

    class Config(api.TinyModel.Config):
        def tokenizer(self) -> Any:
            tokenizer = super().tokenizer()
            names = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
            tools = f"{{% if tools %}}{{{{ '<|system|>' }}}}{names}{{{{ '<|end|>' }}}}{{% endif %}}"
            tokenizer.chat_template = f"{tools}{tokenizer.chat_template}"
            return tokenizer
