"""An engine over an OpenAI-compatible endpoint, for evaluation and data. Also for training if the endpoint returns
token ids and log-probabilities and loads new weights."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field
from safetensors.torch import save_file

from trivium.clients.http import EndpointClient, EndpointConfig, EndpointError, TokenRefused, Url
from trivium.config import EngineConfig, RunConfig, free
from trivium.config.fields import ConfigPath
from trivium.engines.endpoint.forms import chat_body, read_chat, read_tokens, tokens_body
from trivium.engines.load_gate import LoadGate
from trivium.foundation.concurrency import Turns
from trivium.foundation.errors import ConfigError, Problem, RolloutError, SyncError
from trivium.foundation.randomness import SampleKey
from trivium.foundation.registry import resolve
from trivium.models.backbone.shape import positions_in
from trivium.policy import EngineFailure
from trivium.protocols import Weights
from trivium.types import Capabilities, Completion, Request, Sampling, StopReason, capabilities_of

_KEPT = 2
"""Number of versions whose files are kept: the current one, and the previous one, which a server may still read."""
_RAW = 1e-3
"""If only one token can be sampled, a log-probability below `-_RAW` is not that of the sampling distribution."""


class EndpointEngine:
    """Completions from a service over HTTP.

    Requests are retried, bounded and counted as those of rewards over HTTP are (`trivium.clients.http`). One that
    fails for good fails its rollout; a token that is refused ends the run.
    """

    class Config(EndpointConfig, EngineConfig):
        kind: str = "endpoint"
        model: str
        """The name of the model at the endpoint. `urls` are its base URLs (http://host:8000/v1)."""
        protocol: Literal["tokens", "chat"] = "tokens"
        """`tokens` sends token ids to `/completions` and reads token ids and log-probabilities, as vLLM and the
        endpoint of `run.mode: serve` return them: exact, and what training needs. `chat` sends messages to
        `/chat/completions` and reads text: any endpoint, for evaluation and data."""
        max_context: int | None = Field(default=None, ge=2)
        """Longest prompt and completion together, in tokens; unset: the context length of the model in `model.path`."""
        send_seed: bool = True
        """Whether each request has a seed that follows from the run's seed and its place in the run."""
        repeatable: bool = False
        """Whether equal seeds give equal completions at this endpoint, regardless of its other requests."""
        extra_body: dict[str, Any] = Field(default={})
        """Further keys of each request, for example `{chat_template_kwargs: {enable_thinking: false}}` for vLLM; null
        leaves one out, where an endpoint refuses it (`{stop_token_ids: null}`; with `chat`, OpenAI's own refuses
        `top_k`, `min_p`, `min_tokens` and `repetition_penalty`)."""
        update_urls: tuple[Url, ...] = ()
        """URLs of each server that load new weights: `{model_path: DIRECTORY, weight_version: N}` is posted to them, as
        SGLang's `/update_weights_from_disk` reads it. Empty: the policy behind the endpoint never changes, and nothing
        can be trained with it."""
        update_dir: ConfigPath | None = free(None)
        """Directory that this process and the servers see under the same path, where weights are written for them."""
        attempt_s: float = free(600.0, gt=0)
        """Longest time of one attempt, in seconds. The longest completion must fit."""
        total_s: float = free(1800.0, gt=0)
        """Longest time of all attempts of one request and the pauses between them, in seconds."""
        max_concurrent: int = free(64, ge=1)
        """Requests that may be in progress at the same time; further ones wait."""

        def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            yield from super().problems(run, where)
            variables: dict[str, Any] = getattr(run.model, "template_variables", {})
            sent = self.extra_body.get("chat_template_kwargs")
            if self.protocol == "chat" and variables and sent != variables:
                reason, do = f"the server renders the prompts, with {sent}", "set them in both places"
                expected = f"the model.template_variables {variables}"
                yield Problem(f"{where}.extra_body.chat_template_kwargs", expected, reason, do)
            if self.update_urls and self.update_dir is None:
                do = "name a directory that the servers can read"
                yield Problem(f"{where}.update_dir", "weights for update_urls", "update_dir is not set", do)
            if self.update_urls and self.protocol != "tokens":
                reason, do = "it returns text, and training needs the sampled tokens", "use protocol tokens"
                yield Problem(f"{where}.protocol", "protocol chat with update_urls", reason, do)

        def machine_problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            explored = capabilities_of(resolve("buffers", run.buffer.kind)).explored
            if self.update_urls or run.run.mode == "bench" or not (explored or run.evaluation.taskset is not None):
                return
            yield Problem(
                f"{where}.kind",
                "train, or evaluate what is trained, with engine.kind endpoint",
                "the endpoint always samples from the same policy: engine.update_urls is empty",
                "evaluate it alone (`trivium eval CONFIG --step 0`), set engine.update_urls if the server supports "
                "it, or use engine.kind torch",
            )

    capabilities = Capabilities(adopts_weights=False, exact_log_prob=False)

    def __init__(
        self,
        config: Config,
        *,
        model_dir: Path,
        eos_token_ids: frozenset[int],
        decode: Callable[[Sequence[int]], str],
        threads: int,
    ) -> None:
        """Raises ConfigError if the token for the service or the context limit is missing."""
        del decode, threads  # the endpoint looks for stop strings
        self.config, self._model_dir, self._eos = config, model_dir, eos_token_ids
        self.capabilities = replace(
            self.capabilities, exact_sampling=config.repeatable, adopts_weights=bool(config.update_urls)
        )
        self._path = "/completions" if config.protocol == "tokens" else "/chat/completions"
        self._client = EndpointClient(config, self._path, what="a completion")
        self._updates = [
            EndpointClient(config.model_copy(update={"urls": (url,)}), what="new weights") for url in config.update_urls
        ]
        self.max_context = _context(config.max_context, model_dir)
        self.version = 0
        self._encode = _encoder(model_dir) if config.protocol == "chat" else None
        self._turns, self._gate = Turns(config.max_concurrent), LoadGate()
        self._working: set[asyncio.Task[Completion]] = set()
        self._closed = self._trains = False

    async def generate(self, request: Request) -> Completion:
        """One completion. Raises EndpointError if the service returns none, EngineFailure if it refuses the token or
        the engine is closed."""
        self._check_open()
        work = asyncio.ensure_future(self._generate(request))  # a task of its own, which `close` can cancel
        self._working.add(work)
        try:
            return await work
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and task is not None and not task.cancelling():
                empty = np.empty(0, np.int32)
                return Completion(empty, empty.astype(np.float32), empty, StopReason.ABORT)
            raise
        finally:
            work.cancel()
            self._working.discard(work)

    async def load(self, version: int, weights: Weights, *, in_flight: str = "finish") -> None:
        """Makes every server load the weights, between completions.

        The first call requests one token to check that the endpoint returns what training needs. Raises ConfigError if
        it does not, and without `update_urls`; SyncError if a server does not load the weights.
        """
        del in_flight
        self._check_open()
        if not self._updates:
            raise ConfigError(
                f"load version {version} into engine.kind endpoint",
                "the endpoint always samples from the same policy: engine.update_urls is empty",
                "evaluate it alone (`trivium eval CONFIG --step 0`), or set update_urls if the server supports it",
            )
        async with self._gate.load():
            if not self._trains:
                await self._check_for_training()
                self._trains = True
            directory = await asyncio.to_thread(lambda: self._write(version, dict(weights)))
            body = {"model_path": str(directory), "weight_version": str(version)}
            try:
                responses = await asyncio.gather(*(client.post(body) for client in self._updates))
            except EndpointError as error:
                raise SyncError(error.asked, error.found, error.do) from error
            for url, response in responses:
                if isinstance(response, dict) and response.get("success") is False:
                    reason = str(response.get("message", "success: false"))
                    raise SyncError(f"new weights at {url}", reason, "look at the server's log")
            self.version = version

    async def close(self) -> None:
        """Completions in progress end at once with `abort` and no tokens."""
        self._closed = True
        for work in self._working:
            work.cancel()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineFailure("a completion of the engine", "the engine was closed", "build a new engine")

    async def _generate(self, request: Request) -> Completion:
        async with self._gate.completion(), self._turns:
            return await self._ask(request)

    async def _ask(self, request: Request) -> Completion:
        config = self.config
        seed = request.key.digest() >> 1 if config.send_seed else None  # servers store it in 63 bits
        if config.protocol == "tokens" and request.media:
            do = "use protocol chat: it sends images with their messages"
            raise RolloutError("a completion of a prompt with images", "protocol tokens sends token ids alone", do)
        tokens = config.protocol == "tokens"
        body = tokens_body(config.model, request, self._eos, seed) if tokens else chat_body(config.model, request, seed)
        body = {name: value for name, value in (body | config.extra_body).items() if value is not None}
        try:
            url, value = await self._client.post(body)
        except TokenRefused as error:
            raise EngineFailure(error.asked, error.found, error.do) from error
        if tokens:
            return read_tokens(self._client, url, value, request, self._eos, self.version)
        return read_chat(self._client, url, value, self._encode, request, self._eos, self.version)

    async def _check_for_training(self) -> None:
        """Raises ConfigError if the endpoint does not return what training needs."""
        # With one candidate, the log-probability in the sampled distribution is 0, whatever the model.
        prompt, sampling = np.array([min(self._eos, default=1)], np.int32), Sampling(1, top_k=1)
        purpose = f"train with the endpoint {self.config.urls[0]}"
        try:
            completion = await self._ask(Request(prompt, sampling, SampleKey(0, "endpoint", "", "")))
        except (EndpointError, EngineFailure) as error:
            raise ConfigError(purpose, error.found, error.do) from error
        if (log_prob := float(completion.log_prob[0])) < -_RAW:
            raise ConfigError(
                purpose,
                f"a log-probability of {log_prob:.3g} although only one token could be sampled: it does not describe "
                f"the sampled distribution",
                "start vLLM with --logprobs-mode processed_logprobs",
            )

    def _write(self, version: int, weights: dict[str, Any]) -> Path:
        """Writes a directory with these weights and the other files of the model directory. Removes old versions."""
        root = Path(str(self.config.update_dir))
        directory = root / f"version-{version:06d}"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        for file in self._model_dir.iterdir():
            # An index would name the weight files of the model directory; here all weights are in one file.
            if file.suffix in (".json", ".jinja", ".txt", ".model") and not file.name.endswith(".index.json"):
                shutil.copyfile(file, directory / file.name)
        # Copies, because safetensors refuses tensors that share memory, as tied ones do.
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        for old in sorted(root.glob("version-??????"))[:-_KEPT]:
            shutil.rmtree(old)
        return directory


def _context(configured: int | None, model_dir: Path) -> int:
    built_for = positions_in(model_dir) if configured is None else configured
    if built_for is None:
        do = "set engine.max_context"
        raise ConfigError("the longest context", "the model's config does not say (max_position_embeddings)", do)
    return built_for


def _encoder(model_dir: Path) -> Callable[[str], Sequence[int]]:
    """The model's tokenizer, without special tokens."""
    from transformers import AutoTokenizer  # imported here, so that reading a config does not wait for it

    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
