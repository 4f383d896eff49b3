"""Policy: the interface of workflows to the model. Messages in, Turn out; every turn is recorded with its tokens."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import numpy as np

from trivium.foundation.errors import RewardError, RolloutError, TriviumError, described, text_of
from trivium.protocols import StreamingEngine
from trivium.types import Completion, IntArray, Message, Prompt, Request, Sampling, StopReason, Turn

if TYPE_CHECKING:
    from trivium.foundation.concurrency import Threads
    from trivium.foundation.randomness import SampleKey
    from trivium.protocols import Progress, Renderer, RolloutEngine
    from trivium.protocols.rollout import OnTokens
    from trivium.types import Task


MAX_REWARD = 1e9
"""The largest magnitude of a reward. Training computes in float32, which can represent the square of this number and
sums of such squares. A reward of 1e39 would be infinite and make every gradient NaN."""
MAX_METRIC = 1e38
"""The largest metric of a workflow, representable in float32."""
ENGINE_S, ROLLOUT_S, REWARD_S = "perf/engine_s", "perf/rollout_s", "perf/reward_s"
"""Metrics of a trajectory: seconds of its completions, of its workflow and of its reward."""
_MAX_NAME, _MAX_STATE = 200, 1 << 20


def finite_number(value: object, largest: float = MAX_REWARD) -> float:
    """Converts a number of user code (a Python number, or a NumPy or torch scalar) to float. Raises a ValueError that
    describes a value that is not a finite number of at most `largest`."""
    if type(value) is float and -largest <= value <= largest:
        return value
    try:
        item = getattr(value, "item", None)
        number = item() if item is not None and getattr(value, "shape", None) == () else value
        if not isinstance(number, Real | np.bool_):
            raise ValueError(described(value))
        number = float(cast("float", number))
    except ValueError:
        raise
    except OverflowError:
        raise ValueError("a number too large for a float") from None
    except Exception as error:
        raise ValueError(f"a {type(value).__name__} that raises {type(error).__name__} when it is read") from error
    if not math.isfinite(number):
        raise ValueError(f"{number}, which is not a finite number")
    if abs(number) > largest:
        raise ValueError(f"{number:g}, and {largest:g} is the largest that can be used")
    return number


def named_numbers(
    what: str, numbers: object, *, source: str = "the workflow", largest: float = MAX_REWARD
) -> dict[str, float]:
    """Checks rewards (or other numbers) by name from user code or a request, and converts them to floats.

    Raises RewardError unless it is a mapping from short printable names to values that `finite_number` accepts.
    """
    if not isinstance(numbers, Mapping):
        raise RewardError(f"{what}s by name", f"{source} gave {described(numbers)}", "give {'name': number}")
    checked: dict[str, float] = {}
    for name, value in cast("Mapping[object, object]", numbers).items():
        if not (isinstance(name, str) and name.isprintable() and 0 < len(name) <= _MAX_NAME):
            raise RewardError(
                f"a {what} with a name", f"{source} named it {described(name)}", "use short printable text"
            )
        try:
            checked[name] = finite_number(value, largest)
        except ValueError as error:
            raise RewardError(f"a finite number for {what} {name!r}", f"{source} gave {error}", "give floats") from None
    return checked


class PromptTooLong(RolloutError):
    """The conversation leaves no space for a completion."""


class EngineFailure(TriviumError):
    """A failure of the engine itself, which ends the run."""


async def sampled(engine: RolloutEngine, request: Request, on_tokens: OnTokens | None) -> Completion:
    """One completion of an engine. Calls `on_tokens` with its tokens: while they are sampled if the engine is a
    `StreamingEngine`, otherwise with all of them at the end."""
    if on_tokens is None:
        return await engine.generate(request)
    if isinstance(engine, StreamingEngine):
        return await engine.stream(request, on_tokens)
    completion = await engine.generate(request)
    on_tokens(completion.tokens.tolist(), completion.log_prob.tolist())
    return completion


@dataclass
class _Rollout:
    """The state that all forks of one rollout share."""

    turns: dict[tuple[int | str, ...], Turn] = field(default_factory=dict[tuple[int | str, ...], Turn])
    """The recorded turns by call path."""
    waiting: set[asyncio.Task[Any]] = field(default_factory=set[asyncio.Task[Any]])
    """The tasks that wait for a completion."""
    over: bool = False
    """Whether the rollout has ended, so that no further completion is allowed."""
    engine_s: float = 0.0
    """The seconds of its completions in the engine."""


class Policy:
    """The interface of one trajectory to the current policy.

    A conversation that continues the last one (its messages, the completion as text, new messages) continues its
    tokens; anything else is rendered from the start. The completion's own tokens are never encoded again.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        renderer: Renderer,
        sampling: Sampling,
        key: SampleKey,
        max_context: int,
        _rollout: _Rollout | None = None,
        *,
        threads: Threads | None = None,
    ) -> None:
        """`threads` encodes conversations; None: the event loop encodes them."""
        self._threads = threads
        self._engine, self._renderer = engine, renderer
        self._sampling, self._key, self._max_context = sampling, key, max_context
        self._rollout = _rollout or _Rollout()
        self.metrics: dict[str, float] = {}
        """Metrics of the workflow; their means are logged under `workflow/`. Those that Trivium
        measures itself, such as `perf/engine_s`, are logged under their own names."""
        self.feedback = ""
        """What the environment says about the rollout after its end, for a teacher that reads more than the policy
        (`algorithm.teacher.context`)."""
        self._participant = ""
        """The name of the fork that this policy belongs to."""
        self._numbers = itertools.count()
        """Numbers the completions with this key, those of branches included."""
        self._forks: set[str] = set()
        self._history: tuple[Message, ...] = ()
        self._last: tuple[Prompt, IntArray] | None = None
        """The prompt of the last completion, and its tokens."""
        self._stop_reason = StopReason.EOS

    async def generate(
        self,
        messages: Sequence[Message],
        *,
        max_new_tokens: int | None = None,
        tokens: IntArray | None = None,
        progress: Progress | None = None,
    ) -> Turn:
        """Generates the assistant's next turn of a conversation. `tokens` is the prompt, if the caller has rendered the
        conversation itself. `progress` follows the completion.

        Raises PromptTooLong if the rendered conversation fills the context, RolloutError after the end of the rollout.
        """
        conversation = tuple(messages)
        if tokens is not None:
            prompt = self._prompt_of(tokens)
        elif self._threads is None:
            prompt = self._prompt(conversation)
        else:
            prompt = await self._threads.run(lambda: self._prompt(conversation))
        space = self._max_context - len(prompt)
        if space < 1:
            raise _too_long(prompt, self._max_context)
        wanted = self._sampling.max_new_tokens if max_new_tokens is None else max_new_tokens
        limit = min(wanted, space)
        same = limit == self._sampling.max_new_tokens
        sampling = self._sampling if same else replace(self._sampling, max_new_tokens=limit)
        key = self._key.child(next(self._numbers))  # a refused prompt takes no number
        unexpanded = prompt.unexpanded if prompt.media else None
        request = Request(prompt.tokens, sampling, key, prompt.media, unexpanded, conversation)
        if progress is not None:
            progress.begin(prompt)
        completion = await self._generate(request, progress)
        turn = Turn(
            prompt.tokens,
            completion.tokens,
            completion.log_prob,
            completion.policy_version,
            completion.stop_reason,
            self._renderer.decode(completion.tokens) if completion.text is None else completion.text,
            prompt.media,
            participant=self._participant,
            extra=completion.extra,
        )
        self._rollout.turns[key.path] = turn
        self._history = (*conversation, Message("assistant", turn.text))
        self._last = prompt, turn.tokens
        self._stop_reason = turn.stop_reason
        return turn

    def credit(self, turn: Turn, *, reward: float = 0.0, state: str = "") -> Turn:
        """Sets the reward of a turn and the name of its state, also in the record. Returns the new turn.

        Estimators that distinguish turns read both. The reward is a part of the trajectory's reward, not an addition to
        it. Raises RolloutError for a turn that is not in the record, RewardError for an invalid reward.
        """
        record = self._rollout.turns
        # By identity: turns hold arrays, which `==` compares element by element.
        path = next((path for path, recorded in record.items() if recorded is turn), None)
        if path is None:
            raise RolloutError(
                "credit for a turn", "it is not in the record", "credit a turn that `generate` returned, and only once"
            )
        reward = named_numbers("reward", {"of a turn": reward})["of a turn"]
        credited = replace(turn, reward=reward, state=text_of(state, _MAX_STATE))
        record[path] = credited
        return credited

    def fork(self, name: str) -> Policy:
        """A second participant: a policy with its own conversation and random numbers. Its turns join the same record.

        Rewards named like a fork (`{"proposer": 1.0, "solver": 0.0}`, or `proposer/novelty`) are those of its turns
        alone. A fork of a fork belongs to the same participant. Raises RolloutError for a duplicate name, since both
        forks would draw the same numbers.
        """
        if name in self._forks:
            raise RolloutError(f"fork {name!r}", "a fork of that name exists", "give every fork its own name")
        self._forks.add(name)
        other = self._joined(self._key.child(name))
        other._participant = self._participant or name
        return other

    def _joined(self, key: SampleKey) -> Policy:
        """Another policy whose turns join the same record."""
        other = Policy(
            self._engine, self._renderer, self._sampling, key, self._max_context, self._rollout, threads=self._threads
        )
        other.metrics = self.metrics
        return other

    def branch(self, name: str | None, sampling: Sampling | None = None) -> Policy:
        """A fork that continues this conversation and its tokens. `sampling` replaces the sampling parameters.

        Without a name, the branch shares the random numbers of this policy: the n-th completion of both together uses
        those of this policy's n-th call.
        """
        if name is not None:
            other = self.fork(name)
        else:
            other = self._joined(self._key)
            other._numbers = self._numbers
        other._participant = self._participant
        other._history, other._last, other._stop_reason = self._history, self._last, self._stop_reason
        other._sampling = sampling or self._sampling
        return other

    @property
    def tool_format(self) -> Any:
        """How the model writes calls of tools (`trivium.text.tool_formats`); None if its renderer has no format."""
        return getattr(self._renderer, "tool_format", None)

    def prompt_end(self, num_tokens: int) -> str:
        """The text of the last tokens of the prompt of the last completion; empty before the first one."""
        return "" if self._last is None else self._renderer.decode(self._last[0].tokens[-num_tokens:])

    @property
    def history(self) -> tuple[Message, ...]:
        """The conversation up to and including the last completion; empty before the first one."""
        return self._history

    @property
    def engine_s(self) -> float:
        """The seconds of all completions of the rollout in the engine."""
        return self._rollout.engine_s

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Every turn so far, in the order of the call path (not of completion)."""
        record = self._rollout.turns
        if len(record) < 2:
            return tuple(record.values())
        # A path mixes numbers of calls with names of forks. Zero-padded texts compare, and numbers keep their order.
        return tuple(record[path] for path in sorted(record, key=lambda path: [str(p).zfill(6) for p in path]))

    def end(self) -> None:
        """Ends the rollout with all its forks: cancels completions in progress and refuses new ones."""
        self._rollout.over = True
        for task in self._rollout.waiting:
            task.cancel()

    async def _generate(self, request: Request, progress: Progress | None) -> Completion:
        task = asyncio.current_task()
        assert task is not None
        self._refuse_late()
        self._rollout.waiting.add(task)
        started = time.monotonic()
        try:
            completion = await sampled(self._engine, request, None if progress is None else progress.add)
        except (RolloutError, EngineFailure):
            raise
        except Exception as error:
            raise EngineFailure(
                "a completion from the engine", f"{type(error).__name__}: {error}", "see the engine's error above"
            ) from error
        finally:
            self._rollout.waiting.discard(task)
        self._refuse_late()
        self._rollout.engine_s += time.monotonic() - started
        return completion

    def _refuse_late(self) -> None:
        """Raises RolloutError after the end of the rollout."""
        if self._rollout.over:
            raise RolloutError("a completion", "the rollout has ended", "await all calls before the workflow returns")

    def _prompt(self, conversation: tuple[Message, ...]) -> Prompt:
        """Renders a conversation. If it continues the last one, keeps the tokens of that and renders only the rest."""
        past = len(self._history)
        if self._last and conversation[:past] == self._history and len(conversation) > past:
            start = self._last[0].then(Prompt(self._last[1]))
            return self._renderer.extend(self._history, start, self._stop_reason, conversation[past:])
        return self._renderer.render(conversation)

    def _prompt_of(self, tokens: IntArray) -> Prompt:
        """The prompt of these tokens. If they begin with those of the last completion, it has the media of these."""
        if self._last is not None:
            start = self._last[0].then(Prompt(self._last[1]))
            if np.array_equal(tokens[: len(start)], start.tokens):
                return start.then(Prompt(tokens[len(start) :]))
        return Prompt(tokens)


def _too_long(prompt: Prompt, max_context: int) -> PromptTooLong:
    images = sum(end - start for start, end in (item.span for item in prompt.media if item.span))
    of_images = f" ({images} of them {len(prompt.media)} image(s))" if prompt.media else ""
    return PromptTooLong(
        "a prompt that leaves space for a completion",
        f"{len(prompt)} tokens{of_images}, and the context holds {max_context}",
        "shorten the task, or raise engine.max_context"
        + ("; a smaller image has fewer tokens" if prompt.media else ""),
    )


@runtime_checkable
class Workflow(Protocol):
    """Rolls out one task with a policy. The policy records every turn itself."""

    async def run(self, task: Task, policy: Policy) -> Mapping[str, float] | None:
        """Rewards from the rollout itself, by name; None if only reward functions give rewards."""
