"""What buffers over existing data have in common: they issue no slots, and nothing is put into them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trivium.foundation.errors import DataError
from trivium.types import Capabilities, Group, Lease


class ReadOnlyBuffer:
    """The explorers' side of a buffer without explorers."""

    capabilities = Capabilities(explored=False)

    async def lease(self, owner: str, *, wait: bool = True) -> Lease | None:
        raise _refusal("a slot to explore")

    async def put(self, owner: str, group: Group) -> None:
        raise _refusal("put a group")

    async def cancelled_leases(self, owner: str) -> Sequence[Lease]:
        raise _refusal("cancelled leases")

    async def release(self, owner: str) -> int:
        return 0

    async def counts(self) -> Mapping[str, int]:
        return {}

    async def retry_on_resume(self, slots: Sequence[int]) -> None: ...

    async def drain(self, version: int) -> None: ...

    async def advance(self, owner: str, version: int) -> None: ...

    async def discard(self, version: int) -> int:
        return 0

    async def close(self) -> None: ...


def _refusal(request: str) -> DataError:
    return DataError(request, "this buffer is filled from files", "use buffer.kind: memory to explore")
