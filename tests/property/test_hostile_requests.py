"""Whatever a client sends to the gateway, it gets an answer that blames the request, and the next client is served."""

from __future__ import annotations

import asyncio
import json
import os
import random
from pathlib import Path
from typing import Any

from tests.property.test_hostile_configs import VALUES, places
from tests.serving import served

BODIES = int(os.environ.get("TRIVIUM_FUZZ", "150"))
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "policy",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "1+1="}]}],
        "temperature": 1.0,
        "max_tokens": 4,
        "n": 1,
        "stop": ["x"],
        "logprobs": True,
        "stream": False,
        "metadata": {"task": "a", "session": "b"},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    },
    "/feedback": {"session": "b", "reward": 1.0, "task": "a"},
}


def body(dice: random.Random, good: dict[str, Any]) -> bytes:
    tree = json.loads(json.dumps(good))
    for _ in range(dice.choice((1, 1, 2, 5))):
        if found := places(tree):
            container, key = dice.choice(found)
            if dice.random() < 0.2:
                del container[key]
            else:
                container[key] = dice.choice(VALUES)
    text = json.dumps(tree).encode()
    if dice.random() < 0.25:
        place = dice.randrange(len(text))
        text = text[:place] + dice.choice((b"\xff", b"", b"{", b"\x00", b"[" * 2000, b"1e999")) + text[place + 1 :]
    return text


async def test_any_body_is_answered_and_the_gateway_goes_on(tmp_path: Path) -> None:
    dice, blamed = random.Random(2026), 0
    async with served(tmp_path, idle_s=0.2, unstarted_idle_s=0.2) as server:
        for _ in range(BODIES):
            path = dice.choice([*GOOD])
            sent = body(dice, GOOD[path])
            request = server.client.post(path, content=sent, headers={"content-type": "application/json"})
            try:
                answer = await asyncio.wait_for(request, 60)
            except TimeoutError as error:
                raise AssertionError(f"no answer to {sent[:500]!r}") from error
            assert answer.status_code < 500 or answer.status_code == 503, (sent, answer.text)
            blamed += 400 <= answer.status_code < 500
        assert blamed > BODIES // 2
        assert not server.running.done()
        assert (await server.client.get("/health")).status_code == 200
