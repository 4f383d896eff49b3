"""A game of guessing a digit, which `agent_game` and `verifiers_game` offer behind several doors."""

from __future__ import annotations

import json

from trivium import api

TOOL = {
    "name": "guess",
    "description": "Compares a digit with the hidden one.",
    "parameters": {"type": "object", "properties": {"digit": {"type": "integer"}}, "required": ["digit"]},
}
MISS = 0.125


class Game:
    """A hidden digit; a hit earns 1, and each miss costs `MISS`."""

    def __init__(self, secret: int) -> None:
        self.secret, self.reward, self.hit = secret, 0.0, False

    def guess(self, digit: object) -> str:
        if digit == self.secret:
            self.reward += 0.0 if self.hit else 1.0
            self.hit = True
            return "hit"
        self.reward -= MISS
        if not isinstance(digit, int) or not 0 <= digit <= 9:
            return "digit?"
        return "up" if digit < self.secret else "down"

    def play(self, completion: str) -> tuple[list[str], float, bool]:
        """(results of the calls, reward, whether the completion ends the game: it calls nothing)."""
        before = self.reward
        _, calls = api.read_tool_calls(completion, {"guess"})
        results = [self.guess(json.loads(call.arguments).get("digit")) for call in calls]
        return results, self.reward - before, not calls
