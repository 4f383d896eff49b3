"""An agent written against the plain `openai` client, trained without a change.

    python examples/train_an_agent.py

`episode` is the agent: it has no tokens, gradients or versions. It names its task and, at the end, reports the reward.
`trivium run examples/agent.yaml` serves the policy to it, trains on its rollouts, and serves the newer weights.
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
"""The key that clients of the server need; the config names the variable, never the key."""
NUMBERS = range(5)
ROLLOUTS = 8
"""As many as `schedule.group_size`: trajectories of one task that are compared."""


async def episode(client: AsyncOpenAI, number: int, session: str) -> float:
    """Asks for a digit larger than `number`, and once more if the first was none. Returns the reward."""
    labels = {"task_id": f"larger than {number}", "session": session}
    messages: list = [{"role": "user", "content": f"{number}?"}]
    for reward in (1.0, 0.5, 0.0):
        if reward == 0.0:
            break
        response = await client.chat.completions.create(model="policy", messages=messages, extra_body=labels)
        text = response.choices[0].message.content or ""
        if text.isdigit() and int(text) > number:
            break
        messages += [response.choices[0].message.model_dump(), {"role": "user", "content": "!"}]
    await client.post("/feedback", body={**labels, "reward": reward}, cast_to=object)
    return reward


async def run_episodes(url: str, name: str = "run") -> list[float]:
    """Runs round after round of episodes for as long as the policy is served. Returns the mean reward of each round."""
    means: list[float] = []
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=1) as client:
        while True:
            labels = [(number, f"{name} {len(means)}.{index}") for number in NUMBERS for index in range(ROLLOUTS)]
            results = await asyncio.gather(*(episode(client, *label) for label in labels), return_exceptions=True)
            for result in results:
                # 410: the rollout has become too stale; 503: the training is over.
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
            address = json.loads((run_dir / "serve.json").read_text())
            if address["pid"] == server.pid and json.load(urlopen(f"{address['url']}/health"))["loaded"]:
                return address["url"]
        except (FileNotFoundError, URLError, HTTPError):
            pass
        time.sleep(0.1)
    raise SystemExit(f"the endpoint did not come up (exit code {server.poll()})")


def main() -> None:
    run_dir = Path("runs/agent")
    command = [sys.executable, "-m", "trivium", "run", str(CONFIG), f"run.dir={run_dir}"]
    server = subprocess.Popen(command)
    try:
        means = asyncio.run(run_episodes(wait_for(server, run_dir)))
        print(f"mean reward of the first round {means[0]:.2f}, of the last {means[-1]:.2f}, in {len(means)} rounds")
    finally:
        server.wait(timeout=60)


if __name__ == "__main__":
    main()
