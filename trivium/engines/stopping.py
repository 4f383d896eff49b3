"""Finds stop strings in a completion that grows token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class StopScan:
    """Scans one completion. Decodes a window of its newest tokens, long enough to hold every stop string whole."""

    def __init__(self, stop: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._stop, self._decode = tuple(stop), decode
        # Slack for a character that the window's first token cuts in two.
        self._enough = max(map(len, stop)) + 8
        self._start = 0

    def hit(self, tokens: Sequence[int]) -> bool:
        """Whether the completion so far contains a stop string; call it once per token, with all tokens."""
        window = tokens[self._start :]
        if any(stop in self._decode(window) for stop in self._stop):
            return True
        middle = self._start + len(window) // 2
        if len(window) > 4 * self._enough and len(self._decode(tokens[middle:])) >= self._enough:
            self._start = middle
        return False
