"""An agent written against the plain `openai` client, trained as it is.

    python examples/train_an_agent.py

`play` is the agent: it knows nothing of tokens, gradients or versions. It says which task it plays and, at the end,
what that was worth. `trivium run examples/agent.yaml` serves the policy to it, trains on what it does, and serves the
better policy from then on.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from openai import APIConnectionError, APIStatusError, AsyncOpenAI

CONFIG = Path(__file__).with_name("agent.yaml")
KEY = os.environ.setdefault("AGENT_KEY", "swordfish")
"""What the server asks of its clients; its config names the variable, never the key."""
NUMBERS = range(5)
PLAYERS = 8
"""As many as `schedule.group_size`: trajectories of one task that are compared."""


async def play(client: AsyncOpenAI, number: int, session: str) -> float:
    """Asks for a digit larger than `number`, and once more if the first was none. Returns the reward."""
    labels = {"task_id": f"larger than {number}", "session": session}
    messages: list = [{"role": "user", "content": f"{number}?"}]
    for reward in (1.0, 0.5, 0.0):
        if reward == 0.0:
            break
        answer = await client.chat.completions.create(model="policy", messages=messages, extra_body=labels)
        text = answer.choices[0].message.content or ""
        if text.isdigit() and int(text) > number:
            break
        messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "!"}]
    await client.post("/feedback", body={**labels, "reward": reward}, cast_to=object)
    return reward


async def play_until_the_end(url: str, name: str = "run") -> list[float]:
    """Plays round after round for as long as somebody is there to play with. Returns the mean reward of each round."""
    means: list[float] = []
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=1) as client:
        while True:
            labels = [(number, f"{name} {len(means)}.{player}") for number in NUMBERS for player in range(PLAYERS)]
            results = await asyncio.gather(*(play(client, *label) for label in labels), return_exceptions=True)
            for result in results:
                # 410: the policy has moved on so far that this playing has no use; 503: the training is over.
                if isinstance(result, BaseException) and not isinstance(result, APIConnectionError | APIStatusError):
                    raise result
            rewards = [result for result in results if isinstance(result, float)]
            if not rewards:
                return means
            means.append(sum(rewards) / len(rewards))


def wait_for(server: subprocess.Popen, run_dir: Path, patience_s: float = 120.0) -> str:
    """The URL of the endpoint, once it listens and the policy is loaded."""
    from urllib.error import HTTPError, URLError
    from urllib.request import urlopen

    end = time.monotonic() + patience_s
    while time.monotonic() < end and server.poll() is None:
        try:
            said = json.loads((run_dir / "serve.json").read_text())
            if said["pid"] == server.pid and json.load(urlopen(f"{said['url']}/health"))["loaded"]:
                return said["url"]
        except (FileNotFoundError, URLError, HTTPError):
            pass
        time.sleep(0.1)
    raise SystemExit(f"the endpoint did not come up (exit code {server.poll()})")


def main() -> None:
    run_dir = Path("runs/agent")
    command = [sys.executable, "-m", "trivium", "run", str(CONFIG), f"run.dir={run_dir}"]
    server = subprocess.Popen(command)
    try:
        means = asyncio.run(play_until_the_end(wait_for(server, run_dir)))
        print(f"mean reward of the first round {means[0]:.2f}, of the last {means[-1]:.2f}, in {len(means)} rounds")
    finally:
        server.wait(timeout=60)


if __name__ == "__main__":
    main()
