"""A reward over HTTP: `trivium serve-reward`. Requests of all clients are scored in common batches."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from trivium.concurrency import gather_or_cancel, wait_for
from trivium.rewards.batcher import Batcher
from trivium.rewards.remote_forms import RemoteScore, Scored
from trivium.serving.bodies import BodyLimits, RequestError, read_body
from trivium.serving.endpoints import cancel_on_disconnect, guarded
from trivium.serving.reward_requests import WantedReward, read_request, response

Score = Callable[[list[WantedReward]], Awaitable[Sequence[Scored]]]


@dataclass(frozen=True)
class RewardServing:
    """How a reward is served."""

    name: str
    """What `/health` calls the reward."""
    max_batch: int = 32
    """The most samples in a batch."""
    window_s: float = 0.005
    """How long the first sample of a batch waits for others, in seconds."""
    max_concurrent: int = 1
    """Batches that are scored at the same time."""
    max_waiting: int = 1024
    """Samples that may wait. A request with more gets 503 and Retry-After."""
    deadline_s: float = 300.0
    """Longest time from a request to its response, in seconds."""
    max_body_bytes: int = 2**26
    whole: bool = False
    """Whether queries are scored as they are, without a search for their prompts."""


class RewardServer:
    """The HTTP routes of a function that scores batches, in the ASGI application `app`."""

    def __init__(
        self, score: Score, lacking: Callable[[Mapping[str, Any]], str], serving: RewardServing, token: str | None
    ) -> None:
        """`lacking` returns a text about the columns that the reward needs beside those given; empty: none."""
        self._serving, self._lacking = serving, lacking
        self._batcher = Batcher(score, serving.max_batch, serving.window_s, serving.max_concurrent)
        self._num_open = 0
        """Samples without an answer."""
        self._counts: Counter[str] = Counter()
        self._stopping = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.app = FastAPI(title="Trivium rewards", docs_url=None, redoc_url=None, openapi_url=None)
        self.app.add_middleware(BodyLimits, max_bytes=serving.max_body_bytes)
        self.app.add_api_route("/health", self._health, methods=["GET"])
        for path in ("/get_reward", "/v1/rewards"):
            self.app.add_api_route(path, guarded(self._rewards, token), methods=["POST"])

    async def stop(self, seconds: float) -> bool:
        """Refuses new requests and waits until those in progress are answered. Returns False if that takes longer than
        `seconds`."""
        self._stopping = True
        try:
            await wait_for(seconds, self._idle.wait())
        except TimeoutError:
            return False
        return True

    async def _health(self) -> dict[str, Any]:
        """Needs no token: status and counts, no content."""
        counts = {name: self._counts[name] for name in ("requests", "samples", "failed", "refused")}
        return {
            "status": "stopping" if self._stopping else "ok",
            "reward": self._serving.name,
            "waiting": self._num_open,
            **counts,
        }

    async def _rewards(self, request: Request) -> Response:
        self._counts["requests"] += 1
        try:
            protocol, wanted = await self._read(request)
            self._admit(len(wanted))
        except RequestError:
            self._counts["refused"] += 1
            raise
        self._num_open += len(wanted)
        self._idle.clear()
        try:
            results = await cancel_on_disconnect(request, self._scored(wanted))
        finally:
            self._num_open -= len(wanted)
            if not self._num_open:
                self._idle.set()
        self._counts.update(samples=len(wanted), failed=sum(not isinstance(r, RemoteScore) for r in results))
        return JSONResponse(response(protocol, results))

    async def _read(self, request: Request) -> tuple[Any, list[WantedReward]]:
        body = read_body(await request.body())
        protocol, wanted = read_request(body, whole=self._serving.whole)
        if lacking := next((text for each in wanted if (text := self._lacking(each.task.columns))), ""):
            do = "send these columns (`labels` and `references` in the forms of OpenRLHF and LightRFT)"
            raise RequestError(400, "samples with the columns that the reward reads", lacking, do, code="columns")
        return protocol, wanted

    def _admit(self, count: int) -> None:
        """Raises RequestError if `count` more samples cannot wait."""
        limit = self._serving.max_waiting
        if self._stopping:
            found, do = "the server is being stopped", "retry: another server may be started"
            raise RequestError(503, "rewards", found, do, code="stopping", retry_after_s=2)
        if count > limit:
            do = "send fewer samples in a request, or raise --max-waiting"
            raise RequestError(413, f"at most {limit} samples in a request", f"{count} of them", do)
        if self._num_open + count > limit:
            found = f"{self._num_open} samples wait, and {limit} may"
            raise RequestError(503, "rewards", found, "retry later", code="busy", retry_after_s=1)

    async def _scored(self, wanted: Sequence[WantedReward]) -> list[Scored]:
        deadline_s = self._serving.deadline_s
        try:
            return await wait_for(deadline_s, gather_or_cancel(self._batcher(each) for each in wanted))
        except TimeoutError as error:
            found, do = f"none within {deadline_s:g} s", "find out why the reward is slow, or raise --deadline"
            raise RequestError(504, f"rewards of {len(wanted)} samples", found, do, code="deadline") from error
