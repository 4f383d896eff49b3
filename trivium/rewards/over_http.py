"""What rewards that a service gives over HTTP have in common."""

from __future__ import annotations

from collections.abc import Iterator

from trivium.clients.http import EndpointConfig
from trivium.config import RewardConfig, RunConfig
from trivium.errors import Problem


class HttpRewardConfig(EndpointConfig, RewardConfig):
    """A reward whose service is named by URLs."""

    def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        yield from super().problems(run, where)
        if self.workers:
            do = "leave workers out: requests are concurrent (max_concurrent) and end at their deadline"
            yield Problem(f"{where}.workers", "a service called from processes", f"workers={self.workers}", do)
