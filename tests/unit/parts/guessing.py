"""A game of guessing a digit, which `agent_game` and `verifiers_game` offer behind several doors.

`python guessing.py [PORT]` is an MCP server on its standard streams or at a port. Each rollout starts one: it imports
nothing of Trivium.
"""

from __future__ import annotations

import json
import sys
from typing import Any

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
        from trivium import api

        before = self.reward
        _, calls = api.read_tool_calls(completion, {"guess"})
        results = [self.guess(json.loads(call.arguments).get("digit")) for call in calls]
        return results, self.reward - before, not calls


def mcp_server() -> Any:
    """An MCP server: `begin(secret)`, `guess(digit)`, `score()`. Each session has a game."""
    from mcp.server.mcpserver import Context, MCPServer

    server, games = MCPServer("guess"), dict[str | None, Game]()

    def session_of(context: Any) -> str | None:
        return (context.headers or {}).get("mcp-session-id")

    def begin(secret: int, context: Any) -> str:
        games[session_of(context)] = Game(secret)
        return ""

    def guess(digit: Any, context: Any) -> str:
        if digit == "crash":
            raise RuntimeError("no digit")
        return games[session_of(context)].guess(digit)

    def score(context: Any) -> str:
        return str(games[session_of(context)].reward)

    for tool in (begin, guess, score):
        tool.__annotations__["context"] = Context  # the package is optional, so it is imported here
    server.add_tool(begin)
    server.add_tool(guess, description=TOOL["description"])
    server.add_tool(score)
    return server


if __name__ == "__main__":
    if sys.argv[1:]:
        mcp_server().run("streamable-http", port=int(sys.argv[1]))
    else:
        mcp_server().run()
