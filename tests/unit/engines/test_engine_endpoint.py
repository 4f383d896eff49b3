"""The engine behind an endpoint: over real sockets, through our own server and through ones that misbehave."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from failing import refused
from fastapi import FastAPI
from reward_services import Behaviour, Service, computed, cut, drip, hung, json_of, raw, service
from safetensors.torch import load_file
from serving import served
from transformers import Qwen3ForCausalLM
from typer.testing import CliRunner

from tests.waiting import until
from trivium.cli import app
from trivium.clients.chat import chat_messages
from trivium.clients.http import EndpointFailed, EndpointTimeout, MalformedResponse
from trivium.engines.endpoint.engine import EndpointEngine
from trivium.engines.torch.engine import TorchEngine
from trivium.foundation.errors import ConfigError, RolloutError, SyncError, TriviumError
from trivium.foundation.randomness import SampleKey
from trivium.policy import EngineFailure
from trivium.testing import check_engine, reference_policy
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import TinyModel, tiny_tokenizer
from trivium.types import Media, Message, Request, Sampling, StopReason, ToolCall

TOKEN = "sesame-of-the-tests"
PROMPTS = [np.arange(3, 3 + length, dtype=np.int32) for length in (1, 6, 20)]
EOS = frozenset({2, *range(40, 60)})


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two policies with distributions far from uniform."""
    paths: list[Path] = []
    for seed in range(2):
        path = tmp_path_factory.mktemp("model") / "built"
        config = TinyModel.Config(alphabet="bytes", tied=False, layers=1, hidden=32, mlp=48, max_position=256)
        TinyModel(config, seed=seed).materialize(path)
        model = Qwen3ForCausalLM.from_pretrained(path)
        with torch.no_grad():
            model.lm_head.weight *= 12
        model.save_pretrained(path)
        paths.append(path)
    return paths


def trivium(*arguments: str) -> tuple[int, str]:
    """(exit code, everything printed)."""
    result = CliRunner().invoke(app, [*arguments])
    return result.exit_code, result.output


def endpoint(url: str, model_dir: Path, eos: frozenset[int] = EOS, **section: Any) -> EndpointEngine:
    quick = {"model": "policy", "attempt_s": 60.0, "total_s": 120.0, "max_attempts": 3}
    config = EndpointEngine.Config(urls=url, **{**quick, **section})
    return EndpointEngine(config, model_dir=model_dir, eos_token_ids=eos, decode=str, threads=1)


def request(prompt: Sequence[int] = (3, 4), *messages: Message, **sampling: Any) -> Request:
    how = Sampling(**{"max_new_tokens": 8, **sampling})
    return Request(np.array(prompt, np.int32), how, SampleKey(0, "t", "t", "t"), messages=messages)


def answer(tokens: Any = (5, 6, 2), log_probs: Any = (-0.5, -1.0, -0.25), reason: Any = "stop", **more: Any) -> Any:
    """What vLLM responds to token ids."""
    logprobs = {"token_logprobs": list(log_probs) if isinstance(log_probs, tuple) else log_probs}
    ids = list(tokens) if isinstance(tokens, tuple) else tokens
    return {"choices": [{"token_ids": ids, "logprobs": logprobs, "finish_reason": reason, **more}]}


async def test_the_contract_of_engines_through_our_own_server(model_dirs: list[Path], tmp_path: Path) -> None:
    renderer = ChatRenderer(tiny_tokenizer("bytes"))
    renderer.eos_token_ids = renderer.eos_token_ids | EOS
    eos = renderer.eos_token_ids
    policy = TorchEngine(
        TorchEngine.Config(), model_dir=model_dirs[0], eos_token_ids=eos, decode=renderer.decode, threads=1
    )

    def extend(app: FastAPI) -> None:
        async def update(body: dict[str, Any]) -> dict[str, Any]:
            weights = load_file(Path(body["model_path"]) / "model.safetensors")
            await policy.load(int(body["weight_version"]), weights.items())
            return {"success": True, "message": "loaded"}

        app.add_api_route("/update_weights_from_disk", update, methods=["POST"])

    async with served(tmp_path, policy=policy, renderer=renderer, extend=extend) as here:
        urls = {"urls": f"{here.url}/v1", "update_urls": [f"{here.url}/update_weights_from_disk"]}

        def make() -> EndpointEngine:
            config = EndpointEngine.Config(model="policy", update_dir=str(tmp_path / "w"), repeatable=True, **urls)
            return EndpointEngine(config, model_dir=model_dirs[0], eos_token_ids=eos, decode=renderer.decode, threads=1)

        await check_engine(
            make,
            PROMPTS,
            eos_token_ids=eos,
            policies=[*map(reference_policy, model_dirs)],
            decode=renderer.decode,
            renderer=renderer,
            patience_s=300,
        )
        assert len([*(tmp_path / "w").iterdir()]) == 2  # of all versions, those that may be in use
        await here.client.get("/health")  # the server lives
    await policy.close()


async def test_an_engine_without_updates_refuses_weights_and_keeps_the_rest_of_the_contract(
    model_dirs: list[Path], tmp_path: Path
) -> None:
    async with served(tmp_path, replies=((65, 66, 67, 68, 69),), max_new_tokens=12) as here:
        eos = ChatRenderer(tiny_tokenizer("bytes")).eos_token_ids
        make: Callable[[], EndpointEngine] = lambda: endpoint(f"{here.url}/v1", model_dirs[0], eos)  # noqa: E731
        await check_engine(make, PROMPTS, eos_token_ids=eos, crowd=20, patience_s=300)
        with refused(ConfigError, "version 1", "engine.update_urls"):
            await make().load(1, [])


def test_training_with_a_policy_that_never_changes_is_refused_before_it_begins(tmp_path: Path) -> None:
    path = config_file(tmp_path, "http://127.0.0.1:9/v1")
    for command in ("check", "run"):
        code, output = trivium(command, str(path))
        assert code == 2
        assert "engine.update_urls is empty" in output
        assert "trivium eval CONFIG --step 0" in output
    code, output = trivium("eval", str(path), "--step", "7")
    assert code == 2
    assert "not from checkpoints" in output


@pytest.mark.parametrize(
    ("behaviours", "expected"),
    [
        ((raw(500, b"busy"), cut, json_of(answer())), None),
        ((hung, json_of(answer())), None),
        ((raw(500, b"out of memory"),), EndpointFailed),
        ((drip,), EndpointTimeout),
        ((raw(200, b"<html>"),), MalformedResponse),
        ((json_of({"error": "x"}),), MalformedResponse),
    ],
)
async def test_what_may_pass_is_tried_again_and_the_rest_is_named(
    behaviours: tuple[Behaviour, ...], expected: type[RolloutError] | None, model_dirs: list[Path]
) -> None:
    async with service(*behaviours, path="/v1") as here:
        slow = hung in behaviours or drip in behaviours
        engine = endpoint(here.url, model_dirs[0], max_attempts=2 if expected else 3, attempt_s=2.0 if slow else 60.0)
        if expected is None:
            done = await engine.generate(request())
            assert (done.tokens.tolist(), done.stop_reason) == ([5, 6, 2], StopReason.EOS)
            assert done.log_prob.tolist() == [-0.5, -1.0, -0.25]
            assert len(here.requests) == len(behaviours)
        else:
            with refused(expected, here.url):
                await engine.generate(request())


@pytest.mark.parametrize(
    ("response", "text"),
    [
        (answer(tokens=None), "token_ids: None"),
        (answer(tokens=("5", 6, 2)), "token_ids: a list"),
        (answer(tokens=(True, 6, 2)), "token_ids: a list"),
        (answer(tokens=(-1, 6, 2)), "token_ids: a list"),
        (answer(log_probs=(-0.5, -1.0)), "3 numbers of at most 0"),
        (answer(log_probs=(-0.5, -1.0, None)), "3 numbers of at most 0"),
        (answer(log_probs=(-0.5, -1.0, 0.5)), "3 numbers of at most 0"),
        (answer(log_probs=(-0.5, -1.0, float("nan"))), "3 numbers of at most 0"),
        (answer(log_probs=None), "3 numbers of at most 0"),
        (answer(reason="content_filter"), "finish_reason 'content_filter'"),
        (answer(reason=None), "finish_reason None"),
        (answer(prompt_token_ids=[1, 3, 4]), "prompt_token_ids that differ from the ids of the request"),
        (answer(tokens=(), log_probs=()), "0 tokens, where 1 to 8"),
        (answer(tokens=(5,) * 9, log_probs=(-1.0,) * 9, reason="length"), "9 tokens, where 1 to 8"),
        ({"choices": []}, "no choices"),
        ([1], "no choices"),
    ],
)
async def test_a_response_that_training_could_not_trust_fails_its_rollout(
    response: Any, text: str, model_dirs: list[Path]
) -> None:
    async with service(json_of(response), path="/v1") as here:
        with refused(MalformedResponse) as raised:
            await endpoint(here.url, model_dirs[0]).generate(request())
    assert text in re.sub(r"\[[^\]]*\] of type list", "a list", str(raised.value))


async def test_the_request_leaves_no_default_to_the_server(model_dirs: list[Path]) -> None:
    async with service(json_of(answer(reason="length")), path="/v1") as here:
        engine = endpoint(here.url, model_dirs[0], extra_body={"priority": 1, "repetition_penalty": None})
        cut = {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "min_new_tokens": 2}
        done = await engine.generate(request(temperature=0.7, **cut, stop=("a", "b")))
        assert done.stop_reason is StopReason.LENGTH
        (received,) = here.requests
    assert received.path == "/v1/completions"
    assert type(received.body.pop("seed")) is int
    assert received.body == {
        "model": "policy",
        "prompt": [3, 4],
        "max_tokens": 8,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "min_tokens": 2,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": sorted(EOS),
        "stop": ["a", "b"],
        "include_stop_str_in_output": True,
        "logprobs": 0,
        "return_token_ids": True,
        "priority": 1,
    }


async def test_the_key_is_sent_shown_nowhere_and_its_refusal_ends_the_run(
    model_dirs: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("POLICY_KEY", TOKEN)
    async with service(raw(500, TOKEN.encode()), raw(401, TOKEN.encode()), path="/v1") as here:
        engine = endpoint(here.url, model_dirs[0], token_variable="POLICY_KEY")
        with refused(EngineFailure, "token") as raised:
            await engine.generate(request())
        assert here.requests[0].headers["authorization"] == f"Bearer {TOKEN}"
    assert TOKEN not in str(raised.value) + caplog.text + engine.config.model_dump_json()


async def test_no_more_requests_than_the_limit_are_in_progress(model_dirs: list[Path]) -> None:
    now, most, three = 0, 0, asyncio.Barrier(3)

    async def behave(received: Any, writer: asyncio.StreamWriter) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await three.wait()
        await asyncio.sleep(0.02)  # in which a fourth one would arrive
        now -= 1
        await json_of(answer())(received, writer)

    async with service(behave, path="/v1") as here:
        engine = endpoint(here.url, model_dirs[0], max_concurrent=3)
        await asyncio.gather(*(engine.generate(request()) for _ in range(12)))
    assert most == 3


async def test_a_cancelled_completion_closes_its_connection(model_dirs: list[Path]) -> None:
    async with service(drip, path="/v1") as here:
        call = asyncio.ensure_future(endpoint(here.url, model_dirs[0]).generate(request()))
        await until(lambda: here.requests)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.wait_for(here.broken.wait(), 60)


# --------------------------------------------------------------------------- weights


def updating(here: Service, model_dir: Path, tmp_path: Path) -> EndpointEngine:
    return endpoint(here.url, model_dir, update_urls=[f"{here.url}/update"], update_dir=str(tmp_path / "w"))


@pytest.mark.parametrize(
    ("behaviours", "kind", "name"),
    [
        ((json_of(answer(tokens=None)),), ConfigError, "token_ids: None"),
        ((json_of(answer((5,), (-0.7,), "length")),), ConfigError, "processed_logprobs"),
        ((raw(404, b"no model policy"),), ConfigError, "404"),
        ((json_of(answer((5,), (0.0,), "length")), json_of({"success": False, "message": "size"})), SyncError, "size"),
        ((json_of(answer((5,), (0.0,), "length")), raw(404, b"no such path")), SyncError, "404"),
    ],
)
async def test_an_endpoint_that_cannot_be_trained_with_is_named_before_the_first_rollout(
    behaviours: tuple[Behaviour, ...], kind: type[TriviumError], name: str, model_dirs: list[Path], tmp_path: Path
) -> None:
    async with service(*behaviours, path="/v1") as here:
        engine = updating(here, model_dirs[0], tmp_path)
        with refused(kind, name):
            await engine.load(0, [("w", torch.ones(2))])
        assert engine.version == 0


def test_sections_that_cannot_work_are_refused(tmp_path: Path) -> None:
    path = config_file(tmp_path, "http://127.0.0.1:9/v1", update_urls=["http://127.0.0.1:9/update"])
    code, output = trivium("check", str(path))
    assert code == 2
    assert "engine.update_dir" in output
    assert "engine.protocol" in output


# --------------------------------------------------------------------------- text


def test_chat_sends_the_calls_and_results_of_rows() -> None:
    row = [
        Message("user", "1+1="),
        Message("assistant", "", tool_calls=(ToolCall("add", '{"a": 1}'),), reasoning="I add."),
        Message("tool", "2", call=0),
    ]
    _, called, told = chat_messages(row)
    [call] = called["tool_calls"]
    assert call == {"id": call["id"], "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert called["reasoning_content"] == "I add."
    assert told == {"role": "tool", "content": "2", "tool_call_id": call["id"], "name": "add"}


async def test_chat_sends_messages_and_images_and_keeps_the_text_as_it_came(model_dirs: list[Path]) -> None:
    text = "caf\u00e9  <|end|> \u2028 done"
    response = {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}
    async with service(json_of(response), path="/v1") as here:
        engine = endpoint(here.url, model_dirs[0], protocol="chat", extra_body={"seed": None})
        image = Media("image/png", b"bytes")
        said = (Message("system", "be brief"), Message("user", "what is <image> ?", (image,)))
        done = await engine.generate(request((3, 4), *said))
        assert (done.text, done.stop_reason, int(done.tokens[-1])) == (text, StopReason.EOS, min(EOS))
        assert not done.log_prob.any()
        (received,) = here.requests
    assert received.path == "/v1/chat/completions"
    assert received.body == {
        "model": "policy",
        "messages": [
            {"role": "system", "content": "be brief"},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "what is "},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,Ynl0ZXM="}},
                    {"type": "text", "text": " ?"},
                ],
            },
        ],
        "max_tokens": 8,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "min_tokens": 0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }


def config_file(tmp_path: Path, url: str, **engine: Any) -> Path:
    config = {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"kind": "tiny", "alphabet": "bytes"},
        "tasks": {"train": {"kind": "arithmetic"}, "test": {"kind": "arithmetic", "count": 12}},
        "rewards": ["exact"],
        "engine": {"kind": "endpoint", "model": "m", "urls": url, "protocol": "chat", **engine},
        "evaluation": {"taskset": "test"},
    }
    path = tmp_path / "config.json.yaml"
    path.write_text(json.dumps(config))
    return path


async def test_eval_and_data_from_an_endpoint_that_knows_only_chat(tmp_path: Path) -> None:
    def solve(body: dict[str, Any]) -> dict[str, Any]:
        numbers = re.findall(r"\d+", body["messages"][-1]["content"])
        return {"choices": [{"message": {"content": str(sum(map(int, numbers)))}, "finish_reason": "stop"}]}

    async with service(computed(solve), path="/v1") as here:
        path, rows, tasks = config_file(tmp_path, here.url), tmp_path / "rows.jsonl", tmp_path / "tasks.jsonl"
        saved = ("--save", str(rows), "--tasks", str(tasks))
        code, output = await asyncio.to_thread(trivium, "eval", str(path), "--step", "0", *saved)
        assert code == 0, output
        assert len(here.requests) == 12
    written = [json.loads(line) for line in rows.read_text().splitlines()]
    assert len(written) == 12
    assert all(row["completion"] == row["answer"] and row["reward"] == 1.0 for row in written)
    assert written[0]["prompt"][-1]["role"] == "user"
    assert trivium("eval", str(path), "--step", "0", "--save", str(path))[0] == 2
    rows.write_text(rows.read_text() + "\n")
    assert trivium("eval", str(path), "--step", "0", "--save", str(rows))[0] == 2  # edited
    again = [json.loads(line) for line in tasks.read_text().splitlines()]
    for task, row in zip(again, written, strict=True):
        assert task.pop("reference_rewards") == [1.0]
        assert (row.pop("sample_index"), row.pop("stop_reason"), row.pop("reward")) == (0, "eos", 1.0)
        assert task == row


async def test_eval_without_rewards_saves_completions(tmp_path: Path) -> None:
    answer = {"choices": [{"message": {"content": "42"}, "finish_reason": "length"}]}
    async with service(computed(lambda _: answer), path="/v1") as here:
        path, rows = config_file(tmp_path, here.url), tmp_path / "rows.jsonl"
        without = (str(path), "--step", "0", "rewards=[]", "evaluation={samples: 2, k: [1, 2]}")
        code, output = await asyncio.to_thread(trivium, "eval", *without, "--save", str(rows))
        assert code == 0, output
        assert set(json.loads(output[output.index("{\n") :])) == {
            f"eval/test/{name}" for name in ("response_tokens", "failed", "version")
        }
        refused = await asyncio.to_thread(trivium, "eval", *without, "--tasks", str(tmp_path / "tasks.jsonl"))
        assert (refused[0], "--tasks" in refused[1]) == (2, True), refused
    written = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["sample_index"] for row in written] == [0, 1] * 12
    assert {(row["completion"], row["stop_reason"]) for row in written} == {("42", "length")}
    assert all(row["prompt"][-1]["role"] == "user" and "reward" not in row for row in written)


SUMS = """
from datetime import date
from trivium.api import Message, Plugin, Task

class Sums:
    Config = Plugin

    def __init__(self, config, *, name, seed):
        self.columns = {COLUMNS}

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return Task("sum-0", (Message("user", "1+1="),), {"answer": "2", **self.columns}, "test")
"""


async def evaluated(tmp_path: Path, columns: str, option: str) -> tuple[int, str, int]:
    """(exit code, output, requests) of an evaluation that writes rows of a task with these columns."""
    (tmp_path / "sums.py").write_text(SUMS.replace("{COLUMNS}", columns))
    reply = {"choices": [{"message": {"content": "2"}, "finish_reason": "stop"}]}
    async with service(computed(lambda _: reply), path="/v1") as here:
        path, source = config_file(tmp_path, here.url), "tasks.test={kind: 'sums.py:Sums'}"
        arguments = (str(path), "--step", "0", option, str(tmp_path / "rows.jsonl"), source)
        code, output = await asyncio.to_thread(trivium, "eval", *arguments)
        return code, output, len(here.requests)


@pytest.mark.parametrize(
    ("columns", "option", "named"),
    [
        ("{'id': 7}", "--save", ("sum-0", "'7'", "tasks.test.id=id")),
        ("{'tags': {'easy'}}", "--tasks", ("sum-0", "'tags'", "set")),
    ],
)
async def test_a_row_that_cannot_be_written_costs_no_rollouts(
    columns: str, option: str, named: tuple[str, ...], tmp_path: Path
) -> None:
    code, output, requests = await evaluated(tmp_path, columns, option)
    assert (code, requests) == (1, 0), output
    assert all(name in output for name in named), output
    assert "Traceback" not in output


async def test_rows_hold_dates_as_text(tmp_path: Path) -> None:
    code, output, _ = await evaluated(tmp_path, "{'id': 'sum-0', 'day': date(2026, 1, 2)}", "--tasks")
    assert code == 0, output
    row = json.loads((tmp_path / "rows.jsonl").read_text())
    assert (row["id"], row["day"], row["reference_rewards"]) == ("sum-0", "2026-01-02", [1.0])
