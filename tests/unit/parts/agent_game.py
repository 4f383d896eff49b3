"""One game of guessing a digit, behind several doors: an environment class, Gymnasium, OpenEnv; `guessing` has MCP.

`python agent_game.py openenv PORT [STEPS]` is an OpenEnv server, which kills itself after so many steps. All doors
write the same messages, and their rewards are sums of the same binary fractions.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from itertools import repeat
from typing import Any

from guessing import TOOL, Game

from trivium import api

TOOLS = json.dumps([{"type": "function", "function": TOOL}])


def rows(with_tools: bool = True) -> list[dict[str, Any]]:
    """A task for each digit. An MCP server brings the tools itself."""
    tools = [{"role": "tools", "content": TOOLS}] if with_tools else []
    prompt = [*tools, {"role": "user", "content": "digit?"}]
    given = [{"secret": n} for n in range(10)]
    return [{"id": str(each["secret"]), "prompt": prompt, **each, "reset": each, "options": each} for each in given]


class TinyModel(api.TinyModel):
    """A tiny model with a token for each call, so that random weights play the game; its template names the tools."""

    class Config(api.TinyModel.Config):
        alphabet: str = "?deghinopstuw"

        def tokenizer(self) -> Any:
            tokenizer = super().tokenizer()
            tokenizer.add_tokens([json.dumps({"name": "guess", "parameters": {"digit": n}}) for n in range(10)])
            names = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
            tokenizer.chat_template = f"{{% if tools %}}{names}{{% endif %}}{tokenizer.chat_template}"
            return tokenizer


# --- an environment class


class Guess:
    def reset(self, task: Any) -> Any:
        self.game = Game(task.columns["secret"])
        return task.prompt

    def step(self, completion: str) -> tuple[list[Any], float, bool]:
        results, reward, done = self.game.play(completion)
        return [api.Message("tool", result) for result in results], reward, done


# --- Gymnasium and OpenEnv: an observation is a list of results


def observe(observation: Any) -> list[Any]:
    results = observation["results"]
    return [api.Message("tool", each) for each in (json.loads(results) if isinstance(results, str) else results)]


def act(completion: str) -> Any:
    return completion


def register() -> None:
    import gymnasium
    from gymnasium import spaces

    class World(gymnasium.Env):
        action_space = spaces.Text(4096)
        observation_space = spaces.Dict({"results": spaces.Text(4096)})

        def reset(
            self, *, seed: int | None = None, options: dict[str, Any] | None = None
        ) -> tuple[Any, dict[str, Any]]:
            super().reset(seed=seed)
            self.game = Game(int((options or {})["secret"]))
            return {"results": "[]"}, {}

        def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            results, reward, done = self.game.play(action)
            return {"results": json.dumps(results)}, reward, done, False, {}

    if "Guess-v0" not in gymnasium.registry:
        gymnasium.register("Guess-v0", World, disable_env_checker=True, order_enforce=False)


LEFT = iter(range(int(sys.argv[3]), -1, -1)) if len(sys.argv) > 3 and sys.argv[1] == "openenv" else repeat(1)
"""The steps that are left before the server kills itself."""


async def openenv_session(socket: Any) -> None:
    """Serves one session in OpenEnv's wire format."""
    game = Game(0)
    async for raw in socket:
        message = json.loads(raw)
        kind, data = message["type"], message.get("data", {})
        if kind == "close":
            return
        if kind == "reset":
            game = Game(data["secret"])
            answer = {"observation": {"results": []}, "reward": None, "done": False}
        elif "message" not in data:
            error = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": []}
            await socket.send(json.dumps({"type": "error", "data": error}))
            continue
        elif data["message"] == "crash":
            error = {"message": "it broke", "code": "EXECUTION_ERROR"}
            await socket.send(json.dumps({"type": "error", "data": error}))
            continue
        elif data["message"] == "true":
            answer = {"observation": {"results": []}, "reward": True, "done": True}
        else:
            if not next(LEFT):
                os.kill(os.getpid(), signal.SIGKILL)
            results, reward, done = game.play(data["message"])
            answer = {"observation": {"results": results}, "reward": reward, "done": done}
        await socket.send(json.dumps({"type": "observation", "data": answer}))


async def serve_openenv(port: int) -> None:
    from websockets.asyncio.server import serve

    async with serve(openenv_session, "127.0.0.1", port) as server:
        sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
        sys.stdout.flush()
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve_openenv(int(sys.argv[2])))
