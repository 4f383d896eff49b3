"""The scripted engine: what it says, when it fails, and how it waits."""

import asyncio
from collections.abc import Sequence

import numpy as np
from failing import refused

from tests.waiting import until
from trivium.engines.scripted import ScriptedEngine, log_probs_of
from trivium.foundation.errors import ConfigError
from trivium.foundation.randomness import SampleKey
from trivium.policy import EngineFailure
from trivium.types import Request, Sampling, StopReason

EOS = frozenset({0})


def decode(tokens: Sequence[int]) -> str:
    return "".join(chr(token) for token in tokens if token)


def engine_for(**config: object) -> ScriptedEngine:
    said = ScriptedEngine.Config.model_validate({"replies": ["yes", "no, never"], **config})
    return ScriptedEngine(said, eos_token_ids=EOS, decode=decode, encode=lambda text: list(map(ord, text)))


def request(index: int = 0, **sampling: object) -> Request:
    key = SampleKey(0, "train", "t", "1", index=index)
    return Request(np.array([65], np.int32), Sampling(**{"max_new_tokens": 20, **sampling}), key)


def doubled(request: Request, version: int) -> list[int]:
    return [66] * (2 * version + len(request.prompt_tokens))


async def test_replies_follow_from_the_key() -> None:
    first = [await engine_for().generate(request(i)) for i in range(20)]
    again = await asyncio.gather(*(engine_for().generate(request(i)) for i in range(20)))
    assert [decode(a.tokens.tolist()) for a in first] == [decode(a.tokens.tolist()) for a in again]
    assert {decode(a.tokens.tolist()) for a in first} == {"yes", "no, never"}
    assert all(a.tokens[-1] == 0 and a.stop_reason is StopReason.EOS for a in first)
    assert all(np.array_equal(a.log_prob, log_probs_of(a.tokens)) for a in first)
    assert all(len(set(a.log_prob.tolist())) == len(a.tokens) for a in first)


async def test_a_script_sees_the_request_and_the_version() -> None:
    engine = engine_for(replies=(), script=f"{__name__}:doubled")
    await engine.load(2, [("a.weight", None)])
    done = await engine.generate(request())
    assert done.tokens.tolist() == [66] * 5 + [0]
    assert done.policy_version.tolist() == [2] * 6
    assert (engine.loaded, engine.weight_names) == ([2], ["a.weight"])


async def test_some_fail_some_hang_the_same_ones_each_time() -> None:
    async def outcomes(engine: ScriptedEngine) -> list[str]:
        tasks = [asyncio.create_task(engine.generate(request(index))) for index in range(40)]
        for _ in range(1000):  # turns of the event loop: those that do not hang need few
            await asyncio.sleep(0)
        hanging = [task for task in tasks if not task.done()]
        for task in hanging:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        return [type(each).__name__ for each in ended]

    engines = [engine_for(fail_fraction=0.3, hang_fraction=0.3) for _ in range(2)]
    runs = [await outcomes(engine) for engine in engines]
    assert runs[0] == runs[1]
    assert set(runs[0]) == {"Completion", "RolloutError", "CancelledError"}


async def test_breaking_and_closing() -> None:
    engine = engine_for(break_after=1)
    await engine.generate(request())
    with refused(EngineFailure, "breakdown"):
        await engine.generate(request())
    engine = engine_for(hang_fraction=1.0)
    hanging = asyncio.ensure_future(engine.generate(request()))
    await until(lambda: engine._pausing)
    await engine.close()
    assert (await hanging).stop_reason is StopReason.ABORT


def test_scripts_that_cannot_work() -> None:
    with refused(ConfigError, "engine.replies", "engine.script"):
        engine_for(replies=())
    with refused(ConfigError, "engine.replies", "encode"):
        ScriptedEngine(ScriptedEngine.Config(replies=("a",)), eos_token_ids=EOS, decode=decode)
