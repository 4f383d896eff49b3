"""JSON over HTTP to a service that scores or samples: several URLs, retries, and bounds on time and size.

Failures that may be temporary are retried on the least busy URL: failed connections, timeouts, responses 429 and 5xx.
All others are final. Every error is a RolloutError. Its class names the kind of failure, its `place` is the URL, and it
never contains the token.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import logging
import os
import re
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_before_delay
from tenacity import wait_random_exponential as random_exponential

from trivium.config import Plugin, RunConfig
from trivium.config.checks import is_loopback
from trivium.config.fields import ConfigPath, free
from trivium.config.reading import read_bounded
from trivium.foundation.errors import ConfigError, DataError, Problem, RolloutError, text_of

if TYPE_CHECKING:
    import httpx

_log = logging.getLogger("trivium")
_SHOWN = 300
"""Characters of an error response that an error shows."""
_BACKOFF = random_exponential(multiplier=0.25, max=5)
"""Seconds before the next attempt: uniform between 0 and a bound that doubles each time."""
_LONGEST_PAUSE_S = 30.0
"""The longest time for which a failing URL is avoided while others work."""


class EndpointError(RolloutError):
    """A service gave no usable response; `place` is its URL."""


class EndpointUnreachable(EndpointError):
    """No connection, or one that broke before the response was complete."""


class EndpointTimeout(EndpointError):
    """No complete response within `attempt_s`, or within `total_s` for all attempts."""


class EndpointFailed(EndpointError):
    """Response 429 or 5xx to the last attempt."""


class TokenRefused(EndpointError):
    """Response 401 or 403."""


class RequestRefused(EndpointError):
    """Another 4xx, or a redirect. Redirects are not followed, because they would receive the token."""


class MalformedResponse(EndpointError):
    """A response 2xx that is too large, is not JSON, or does not have the protocol's form."""


def _one_or_many(urls: object) -> object:
    return (urls,) if isinstance(urls, str) else urls


def _checked_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not the URL of a service: write http://host:port/path")
    if parts.username or parts.password:
        raise ValueError("a URL with a user or a password would be written to the run directory: use token_variable")
    if not url.isprintable() or " " in url:
        raise ValueError(f"{url!r} has characters that are not allowed in a URL: write http://host:port/path")
    parts.port  # noqa: B018  # raises ValueError for an invalid port
    return url


Url = Annotated[str, AfterValidator(_checked_url)]


class EndpointConfig(Plugin):
    """The fields of every section that calls a service over HTTP."""

    urls: Annotated[tuple[Url, ...], BeforeValidator(_one_or_many)] = free(min_length=1)
    """One URL, or several of equivalent services. Each request goes to the least busy one; a service that fails is
    avoided for a while."""
    token_variable: str | None = free(None)
    """Environment variable with the token that is sent as `Authorization: Bearer ...`."""
    token_file: ConfigPath | None = free(None)
    """File with that token. It is read for every request, so the token can be renewed during the run."""
    attempt_s: float = free(60.0, gt=0)
    """Longest time of one attempt, in seconds, however slowly the response arrives."""
    total_s: float = free(300.0, gt=0)
    """Longest time of all attempts of one request and the pauses between them, in seconds."""
    max_attempts: int = free(5, ge=1)
    """Largest number of failed attempts per request: time-outs, 429 and 5xx are retried, with growing pauses. If the
    service cannot be reached, or sends Retry-After, attempts continue until `total_s`."""
    max_concurrent: int = free(8, ge=1)
    """Requests that may be in progress at the same time."""
    max_response_bytes: int = free(2**24, ge=1024)
    """Largest response, in bytes; a larger one is an error."""

    def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        yield from super().problems(run, where)
        if self.token_variable and self.token_file:
            yield Problem(f"{where}.token_file", "one token", "token_variable and token_file", "leave one of them out")

    def warnings(self, run: RunConfig, where: str) -> Iterator[Problem]:
        yield from super().warnings(run, where)
        for url in self.urls:
            parts = urlsplit(url)
            if (
                (self.token_variable or self.token_file)
                and parts.scheme == "http"
                and not is_loopback(parts.hostname or "")
            ):
                what, do = f"a token for {_shown(url)}", "use https, unless the network is trusted"
                yield Problem(f"{where}.urls", what, "http sends it unencrypted", do)


def read_token(variable: str | None, file: str | None) -> str | None:
    """The token in an environment variable or a file; None if neither is named. Raises ConfigError if it is missing or
    invalid. The error does not contain the token."""
    if variable is None and file is None:
        return None
    where = f"${variable}" if variable is not None else str(file)
    try:
        text = os.environ.get(variable, "") if variable is not None else read_bounded(Path(str(file)))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token in {where}", type(error).__name__, "write the token to that file") from error
    token = text.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        found = "it has characters that are not allowed in a header" if token else "it is not set, or empty"
        raise ConfigError(f"the token in {where}", found, "set it to the token that the service expects")
    return token


@dataclass(eq=False)
class _Server:
    """One of the URLs, and its state."""

    url: str
    in_progress: int = 0
    last_used: int = 0
    failures: int = 0
    """The number of consecutive failures."""
    paused_until: float = 0.0

    def failed(self, retry_after_s: float | None) -> None:
        self.failures += 1
        pause_s = min(_LONGEST_PAUSE_S, 0.5 * 2 ** min(self.failures, 10)) if retry_after_s is None else retry_after_s
        self.paused_until = time.monotonic() + pause_s


class _TryAgain(Exception):
    """An attempt failed, and another one may succeed."""

    def __init__(self, error: EndpointError, retry_after_s: float | None = None) -> None:
        self.error, self.retry_after_s = error, retry_after_s
        # Whether it counts towards `max_attempts`. An unreachable service, which may be starting, and one that sends
        # Retry-After are retried until `total_s`.
        self.counts = retry_after_s is None and not isinstance(error, EndpointUnreachable)


class _Stop:
    """Decides when a request is not retried. Counts its failed attempts, so each request needs a new one."""

    def __init__(self, config: EndpointConfig) -> None:
        self._left = config.max_attempts
        # An attempt with almost no time left would time out, and its error would hide the cause of earlier failures.
        self._in_time = stop_before_delay(config.total_s - min(1.0, config.total_s / 4))

    def __call__(self, state: RetryCallState) -> bool:
        error = state.outcome.exception() if state.outcome is not None else None
        self._left -= isinstance(error, _TryAgain) and error.counts
        return self._left <= 0 or self._in_time(state)


class EndpointClient:
    """Posts JSON to the URLs of a section. Several event loops may use it, also at the same time: each attempt has its
    own connection."""

    def __init__(self, config: EndpointConfig, path: str = "", *, what: str) -> None:
        """`path` is appended to each URL. Errors name `what` is requested. Raises ConfigError without a token."""
        self._config, self._what = config, what
        self._servers = [_Server(_with_path(url, path)) for url in config.urls]
        self._num_attempts = self._num_retries = 0
        self._tls: dict[str, ssl.SSLContext] = {}
        self._token = read_token(config.token_variable, config.token_file)

    async def post(self, body: Mapping[str, Any]) -> tuple[str, Any]:
        """(the URL that answered, the JSON value of its response). Raises EndpointError, or DataError if `body` is not
        JSON."""
        try:
            raw = json.dumps(body, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            do = "give the task's columns JSON values: text, finite numbers, lists, mappings"
            raise DataError("a request as JSON", text_of(error), do) from error
        config = self._config
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_TryAgain),
            wait=self._pause_s,
            stop=_Stop(config),
            before_sleep=self._log_retry,
            reraise=True,
        )
        until = time.monotonic() + config.total_s
        try:
            return await retrying(self._attempt, raw, until)
        except _TryAgain as last:
            raise last.error from None

    async def _attempt(self, raw: bytes, until: float) -> tuple[str, Any]:
        """Sends the request once, to the least busy server among those that are not avoided."""
        now = time.monotonic()
        self._num_attempts += 1
        server = min(self._servers, key=lambda s: (max(0.0, s.paused_until - now), s.in_progress, s.last_used))
        server.last_used, server.in_progress = self._num_attempts, server.in_progress + 1
        try:
            value = await self._send(server.url, raw, max(0.001, min(self._config.attempt_s, until - now)))
        except _TryAgain as failure:
            server.failed(failure.retry_after_s)
            raise
        finally:
            server.in_progress -= 1
        server.failures, server.paused_until = 0, 0.0
        return _shown(server.url), value

    async def _send(self, url: str, raw: bytes, seconds: float) -> Any:
        """The value that a URL answers, before `seconds` are over. Raises _TryAgain if another attempt may succeed."""
        import httpx  # imported here, because the command line must start without it

        self._token = token = read_token(self._config.token_variable, self._config.token_file)
        # No compression: max_response_bytes bounds the bytes that arrive.
        headers = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"}
        headers |= {} if token is None else {"Authorization": f"Bearer {token}"}
        try:
            async with (
                asyncio.timeout(seconds),
                httpx.AsyncClient(verify=self._context(url), timeout=None) as client,
                client.stream("POST", url, content=raw, headers=headers) as response,
            ):
                body = await self._read(response, url)
        except TimeoutError:
            found = f"no complete response within {seconds:.3g} s"
            do = "raise attempt_s, or find out why the service is slow"
            raise _TryAgain(self.error(EndpointTimeout, url, found, do)) from None
        except httpx.TransportError as problem:
            found, do = f"{type(problem).__name__}: {problem}", "start the service, or correct urls"
            raise _TryAgain(self.error(EndpointUnreachable, url, found, do)) from None
        return self._value(url, response, body)

    async def _read(self, response: httpx.Response, url: str) -> bytes:
        body, limit = bytearray(), self._config.max_response_bytes
        async for part in response.aiter_raw():
            body += part
            if len(body) > limit:
                do = "raise max_response_bytes, or correct the service"
                raise self.malformed(url, f"more than {limit:,} bytes", do)
        return bytes(body)

    def _value(self, url: str, response: httpx.Response, body: bytes) -> Any:
        """The JSON value of a whole response, or the error that its status stands for."""
        status, text = response.status_code, body.decode(errors="replace")
        if status == 429 or status >= 500:
            error = self.error(EndpointFailed, url, f"status {status}: {text}", "look at the service's log")
            raise _TryAgain(error, retry_after_s(response.headers.get("Retry-After")))
        if status in (401, 403):
            found = f"status {status}: it refuses {'a request without a token' if self._token is None else 'the token'}"
            do = "set token_variable or token_file to the token of the service"
            raise self.error(TokenRefused, url, found, do)
        if 300 <= status < 400:
            do = "name the URL that it leads to in urls"
            raise self.error(RequestRefused, url, f"status {status}, a redirect", do)
        if not 200 <= status < 300:
            do = "correct the request's protocol, path or data, as the response says"
            raise self.error(RequestRefused, url, f"status {status}: {text}", do)
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            found = f"no JSON ({text_of(error, 80)}): {text}"
            raise self.malformed(url, found, "correct urls, or the service") from None

    def _context(self, url: str) -> ssl.SSLContext:
        """The TLS context of a URL. Made once for each scheme, because reading the bundle of certificates is slow. For
        http it is empty, which avoids reading the bundle."""
        import httpx

        scheme = urlsplit(url).scheme
        if scheme not in self._tls:
            https = scheme == "https"
            self._tls[scheme] = httpx.create_ssl_context() if https else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        return self._tls[scheme]

    def _pause_s(self, state: RetryCallState) -> float:
        """The seconds before the next attempt. Obeys Retry-After, unless another URL is available sooner."""
        error = state.outcome.exception() if state.outcome is not None else None
        if not isinstance(error, _TryAgain) or error.retry_after_s is None:
            return _BACKOFF(state)
        now = time.monotonic()
        return max(_BACKOFF(state), min(error.retry_after_s, *(s.paused_until - now for s in self._servers)))

    def _log_retry(self, state: RetryCallState) -> None:
        self._num_retries += 1
        error = state.outcome.exception() if state.outcome is not None else None
        if self._num_retries & (self._num_retries - 1) == 0 and isinstance(error, _TryAgain):  # 1, 2, 4, 8, ...
            _log.warning("a request for %s is tried again (retry %d)\n%s", self._what, self._num_retries, error.error)

    def malformed(self, url: str, found: str, do: str) -> EndpointError:
        """The error for a response that does not have the protocol's form."""
        return self.error(MalformedResponse, url, found, do)

    def error(self, kind: type[EndpointError], url: str, found: str, do: str) -> EndpointError:
        """An error of this URL. The token, which a service may echo, is removed from it."""
        text = found if self._token is None else found.replace(self._token, "<token>")
        error = kind(f"{self._what} from {_shown(url)}", text_of(text, _SHOWN), do)
        error.place = _shown(url)
        return error


def retry_after_s(header: str | None) -> float | None:
    """The seconds that a Retry-After header asks for, as a number or as a date; None without one."""
    if not header:
        return None
    if re.fullmatch(r"\s*[0-9]+\s*", header):
        return float(header)
    try:
        date = email.utils.parsedate_tz(header)
        return None if date is None else max(0.0, email.utils.mktime_tz(date) - time.time())
    except (ValueError, OverflowError):  # an invalid year
        return None


def _with_path(url: str, path: str) -> str:
    base, mark, query = url.partition("?")
    return f"{base.rstrip('/')}{path}{mark}{query}" if path else url


def _shown(url: str) -> str:
    """The URL without its query, which may contain secrets."""
    return url.partition("?")[0]
