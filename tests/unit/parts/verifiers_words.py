"""A taskset of verifiers without processes: its harness asks the endpoint itself, and fails as its task says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import httpx
import verifiers.v1 as vf

__all__ = ["AskingHarness", "WordTaskset"]

FUNCTION = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


class WordData(vf.TaskData):
    how: str = ""
    """What goes wrong: `raise`, `late` (of the scoring), `harness`, `hang`, `silent`, `edit` (a history)."""
    hint: str | None = "none yet"


class WordTask(vf.Task[WordData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if self.data.how == "raise":
            raise RuntimeError("no score today")
        await asyncio.sleep(60 if self.data.how == "late" else 0)
        return float(trace.last_reply == "yes")

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 4)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class WordTaskset(vf.Taskset[WordTask, vf.TasksetConfig]):
    def load(self) -> Iterable[WordTask]:
        for how in ("", "edit", "raise"):
            data = WordData(prompt="well?", how=how, system_prompt="be brief", hint=None)
            yield WordTask(data, self.config.task)


class AskingHarness(vf.Harness[vf.HarnessConfig]):
    """Sends the conversation until the policy calls nothing, and answers each call with `seen`."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    hanging = asyncio.Event()
    """Set when a program hangs."""
    endpoint = ""
    """That of the program that hangs."""

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> vf.ProgramResult:
        if data.how == "harness":
            return vf.ProgramResult(1, "", "out of memory")
        if data.how == "hang":
            AskingHarness.endpoint = endpoint
            self.hanging.set()
            await asyncio.sleep(60)
        messages: list[Any] = [
            {"role": "system", "content": data.system_prompt},
            {"role": "user", "content": data.prompt},
        ]
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}) as client:
            while data.how != "silent":
                body = {"model": ctx.model, "messages": messages, "tools": [FUNCTION]}
                answer = await client.post(f"{endpoint}/chat/completions", json=body)
                if answer.is_error:
                    return vf.ProgramResult(1, "", answer.text)
                message = answer.json()["choices"][0]["message"]
                calls = message.get("tool_calls") or []
                if data.how == "edit":
                    message["content"] = "edited"
                messages += [message, *({"role": "tool", "tool_call_id": c["id"], "content": "seen"} for c in calls)]
                if not calls:
                    break
        return vf.ProgramResult(0, "", "")
