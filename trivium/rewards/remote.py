"""Rewards from a service over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trivium.clients.http import EndpointClient, EndpointConfig, EndpointError, TokenRefused
from trivium.clients.hub import ModelPath
from trivium.config import RewardConfig, RunConfig
from trivium.config.fields import free
from trivium.foundation.concurrency import Threads
from trivium.foundation.errors import DataError, Problem
from trivium.rewards.batcher import Batcher
from trivium.rewards.remote_forms import FormError, Protocol, RemoteSample, RemoteScore, request, scores
from trivium.types import Capabilities, Media

_ENCODERS = 2
"""Threads that encode images."""
Conversation = Sequence[Mapping[str, str]]


class HttpRewardConfig(EndpointConfig, RewardConfig):
    """A reward from a service that URLs name."""

    def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        yield from super().problems(run, where)
        if self.workers:
            do = "leave workers out: requests are concurrent (max_concurrent) and end at their deadline"
            yield Problem(f"{where}.workers", "a service called from processes", f"workers={self.workers}", do)


class RemoteReward:
    """The score of a completion by a service. Samples that arrive close together share a request.

    A sample without a finite score is an error of its trajectory, never a score of 0. `trivium.clients.http` says
    which requests are tried again.
    """

    capabilities = Capabilities(remote=True)

    class Config(HttpRewardConfig):
        kind: str = "remote"
        protocol: Protocol = "trivium"
        """Form of the requests: `trivium` {samples}, `lightrft` {queries, prompts, references, images}, `openrlhf`
        {query, prompts, labels}."""
        max_batch: int = free(32, ge=1)
        """Largest number of samples per request."""
        window_s: float = free(0.02, ge=0)
        """How long the first sample of a request waits for others, in seconds."""
        chat_template: ModelPath | None = None
        """Directory of a tokenizer whose chat template writes the prompt of `lightrft` and `openrlhf`, special tokens
        included; unset sends the last user message."""
        label_column: str = "answer"
        """The task's column that `openrlhf` sends as `labels`; null for tasks without it."""
        reference_column: str = "reference"
        """The task's column that `lightrft` sends as `references`, if a task of the request has it."""

        def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            yield from super().problems(run, where)
            if self.chat_template is not None and self.protocol == "trivium":
                do = "leave chat_template out: `trivium` sends the messages"
                yield Problem(f"{where}.chat_template", "a template for `trivium`", str(self.chat_template), do)

    def __init__(self, config: Config) -> None:
        """Raises ConfigError without a token, DataError for a tokenizer without a chat template."""
        self._config, self._client = config, EndpointClient(config, what="rewards")
        self._text = None if config.chat_template is None else _templated(Path(config.chat_template))
        self._threads = Threads(_ENCODERS, "a request for rewards")
        self._batcher = Batcher(self._post, config.max_batch, config.window_s, config.max_concurrent)

    async def __call__(
        self,
        prompt: str,
        completion: str,
        prompt_messages: Conversation,
        prompt_media: Sequence[Media],
        **columns: Any,
    ) -> float:
        """Raises EndpointError."""
        config = self._config
        sample = RemoteSample(
            prompt if self._text is None else self._text(prompt_messages),
            completion,
            messages=prompt_messages,
            columns=columns,
            label=columns.get(config.label_column),
            reference=columns.get(config.reference_column),
            images=prompt_media,
        )
        result = await self._batcher(sample)
        if isinstance(result, EndpointError):
            raise result
        return result.reward

    async def score_batch(self, samples: Sequence[RemoteSample]) -> list[RemoteScore | EndpointError]:
        """For each sample, in order: its score, or the error of its request. Requests have at most `max_batch` samples
        and run concurrently. Raises TokenRefused, since no sample can be scored then."""
        results = await asyncio.gather(*(self._batcher(sample) for sample in samples), return_exceptions=True)
        scored: list[RemoteScore | EndpointError] = []
        for result in results:
            if isinstance(result, BaseException) and (
                isinstance(result, TokenRefused) or not isinstance(result, EndpointError)
            ):
                raise result
            scored.append(result)
        return scored

    async def _post(self, samples: list[RemoteSample]) -> list[RemoteScore | EndpointError]:
        protocol = self._config.protocol
        if any(sample.images for sample in samples):  # encoding them may take long
            body = await self._threads.run(lambda: request(protocol, samples))
        else:
            body = request(protocol, samples)
        url, value = await self._client.post(body)
        do = f"correct the service: it must answer in the form of the protocol {protocol!r}"
        try:
            results = scores(protocol, value, len(samples))
        except FormError as error:
            raise self._client.malformed(url, str(error), do) from None
        return [self._client.malformed(url, r, do) if isinstance(r, str) else r for r in results]


def _templated(path: Path) -> Callable[[Conversation], str]:
    """A function that writes messages in the chat template of a tokenizer."""
    from transformers import AutoTokenizer  # here: reading a config must not wait for it

    tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
    if tokenizer.chat_template is None:
        do = "save chat_template.jinja in the directory, or leave chat_template out"
        raise DataError(f"a chat template of {path}", "its tokenizer has none", do)

    def text(messages: Conversation) -> str:
        return tokenizer.apply_chat_template([dict(m) for m in messages], tokenize=False, add_generation_prompt=True)

    return text
