"""Weights that a call passes to its receiver, group by group: the sender waits until a group is taken."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from queue import SimpleQueue
from threading import Event

from trivium.models.weights.stream import Named

Group = Sequence[Named]
"""Tensors that are sent in one message; an empty group ends the weights."""


class Incoming:
    """The receiving end. One thread calls `put`, another one iterates over the tensors."""

    def __init__(self, on_taken: Callable[[], None]) -> None:
        """Calls `on_taken` when the reader takes the first tensor of a group."""
        self._taken = on_taken
        self._arrived = SimpleQueue[list[Named] | Exception]()

    def put(self, group: Group) -> None:
        """Adds a group."""
        self._arrived.put([*group])

    def fail(self, error: Exception) -> None:
        """Makes the reader raise `error`, since the rest does not arrive."""
        self._arrived.put(error)

    def __iter__(self) -> Iterator[Named]:
        while group := self._arrived.get():
            if isinstance(group, Exception):
                raise group
            self._taken()
            while group:
                yield group.pop(0)  # keeps no tensor that the reader has released


class Outgoing:
    """The sending end."""

    def __init__(self) -> None:
        self.put: Callable[[Group], None]
        """Sends a group. The call that has these weights sets it, before the first group is given."""
        self.has_taken = Event()
        """Set when the receiver has begun to read the latest group, or needs no more."""
        self.has_taken.set()
        self.is_over = False
        """Whether the receiver needs no more groups."""

    def give(self, group: Group) -> None:
        """Passes the next group to the receiver."""
        self.has_taken.clear()
        if self.is_over:  # checked after `clear`, since `end` may be called in between
            self.has_taken.set()
        else:
            self.put(group)

    def end(self) -> None:
        """Records that the receiver needs no more groups. Wakes the sender."""
        self.is_over = True
        self.has_taken.set()


def send_to_all(groups: Iterable[Group], receivers: Collection[Outgoing]) -> None:
    """Reads a group once every receiver has taken the previous one. Returns early once no receiver needs more."""
    for group in groups:
        for receiver in receivers:
            receiver.give(group)
        del group  # frees the tensors before the next ones are read
        for receiver in receivers:
            receiver.has_taken.wait()
        if all(receiver.is_over for receiver in receivers):
            return
    for receiver in receivers:
        receiver.give(())
