"""Drafts: the tokens that a completion may continue with, copied from earlier text. A decode step computes them beside
the last token of the completion (speculative decoding without a draft model, Saxena 2023).

A completion follows a source: it looks for its last three tokens in earlier completions of the same task, then in its
own prompt and tokens, and expects what came after them. After a wrong token it expects the source to continue.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

import numpy as np

from trivium.planning.choices import DRAFT_STEP_ROWS
from trivium.types import FloatArray, IntArray

_GRAM = 3
"""How many tokens must agree before a completion follows a source."""
_MASK = 2 ** (16 * _GRAM) - 1
_DEEPEST = 64
"""The largest number of drafts of one completion in a step."""
_OVERHEAD = 2
"""What a step with drafts costs more than one with as many rows without, in rows; and `_ROW` for each of its rows,
whose keys are copied."""
_ROW = 1.15
_TASK_COMPLETIONS, _TASK_TOKENS = 16, 2**13
"""How many completions of a task are kept, the newest ones, and how many tokens of them."""
_ALL_TOKENS = 2**23
"""Tokens that are kept of all tasks together, eight bytes each; the tasks that finished least recently are dropped."""

_CLASSES = -np.array([3, 1.5, 0.7, 0.3, 0.1, 0.03, 0.01])
"""Log-probabilities that separate the classes of tokens of earlier completions: the probability of a token then is the
best estimate of the probability that it is sampled again."""
_OWN = len(_CLASSES) + 1
"""The class of tokens of the completion itself and of its prompt."""
_WRONG = 4
"""After so many wrong tokens in a row a completion no longer follows its source."""
_LONGEST_WAIT = 4
"""The most tokens between two searches for a source."""
_SURE = 16
_LEVELS = [0] * _GRAM + [1] * (_SURE - _GRAM) + [2]
"""The level of trust in a source, by how many tokens in a row agreed with it, up to `_SURE`."""
_RATE_STEP = 1 / 64
"""Weight of the newest observation in a rate."""

_Task = tuple[str, str]
_Kept = tuple[list[int], IntArray, FloatArray]
"""The last tokens of a prompt, the tokens of a completion and their log-probabilities."""


class Text:
    """Tokens, and where each run of `_GRAM` of them was followed last."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.classes: list[int] = []
        self._places: dict[int, int] = {}
        self._gram = 0

    def extend(self, tokens: Sequence[int], classes: Sequence[int]) -> int | None:
        """Adds tokens. Returns where the last `_GRAM` tokens were followed before, if they were."""
        gram, places, before = self._gram, self._places, None
        for place, token in enumerate(tokens, len(self.tokens) + 1):
            # Ids of large vocabularies lose their upper bits. A wrong draft that follows from it is only rejected.
            gram = (gram << 16 | token & 0xFFFF) & _MASK
            before = places.get(gram)
            places[gram] = place
        self.tokens += tokens
        self.classes += classes
        self._gram = gram
        return before

    def followed(self, other: Text) -> int | None:
        """Where the last `_GRAM` tokens of another text are followed in this one."""
        place = self._places.get(other._gram)
        return None if place is None or place == len(self.tokens) else place


class Follower:
    """One completion: its text, and the source that it follows."""

    def __init__(self, prompt: IntArray, earlier: Text) -> None:
        self._earlier, self._own = earlier, Text()
        self._own.extend(prompt.tolist(), [_OWN] * len(prompt))
        self._source: Text | None = None
        self._place = self._agreed = self._wrong = self._failed = 0
        self.count = 0
        """How many tokens of the completion it knows."""
        self.due = 0
        """The length of the completion from which drafts are looked for again."""

    @property
    def follows(self) -> bool:
        return self._source is not None

    def advance(self, tokens: Sequence[int], rates: list[list[float]]) -> None:
        """Adds the newest tokens of the completion, corrects the rates by what was expected of them, and looks for a
        better source."""
        for token in tokens:
            source = self._source
            if source is None or self._place >= len(source.tokens):
                self._source, self._agreed = None, 0
                break
            level, kind = rates[_LEVELS[min(self._agreed, _SURE)]], source.classes[self._place]
            agrees = token == source.tokens[self._place]
            level[kind] += (agrees - level[kind]) * _RATE_STEP
            self._place, self._agreed = self._place + 1, self._agreed + 1 if agrees else 0
            self._wrong = 0 if agrees else self._wrong + 1
        again = self._own.extend(tokens, [_OWN] * len(tokens))
        self.count += len(tokens)
        if self._source is not self._earlier or self._agreed < _GRAM:
            place = self._earlier.followed(self._own)
            if place is not None:
                self._follow(self._earlier, place)
            elif again is not None and self._agreed < _GRAM:
                self._follow(self._own, again)
        if self._wrong >= _WRONG:
            self._source, self._agreed, self._wrong = None, 0, 0
        self._failed = 0 if self._source is not None else self._failed + 1
        self.due = self.count + (1 if self._source is not None else min(self._failed, _LONGEST_WAIT))

    def _follow(self, source: Text, place: int) -> None:
        self._source, self._place, self._agreed, self._wrong = source, place, _GRAM, 0

    def expected(self, most: int) -> list[int]:
        """The next tokens."""
        return [] if self._source is None else self._source.tokens[self._place : self._place + most]

    def chances(self, most: int, floor: float, rates: list[list[float]]) -> list[float]:
        """The probabilities that the next token is as expected, that the next two are, and so on, down to `floor`."""
        source, chance, chances = self._source, 1.0, list[float]()
        if source is not None:
            for agreed, kind in enumerate(source.classes[self._place : self._place + most], self._agreed):
                chance *= rates[_LEVELS[min(agreed, _SURE)]][kind]
                if chance <= floor:
                    break
                chances.append(chance)
        return chances


def _add(text: Text, completion: _Kept) -> None:
    before, tokens, log_prob = completion
    classes = np.searchsorted(_CLASSES, log_prob, side="right").tolist()
    text.extend([*before, *tokens.tolist()], [_OWN] * len(before) + classes)


class Drafts:
    """Chooses the drafts of each step, so that the expected number of tokens for its cost is the largest.

    A step costs as much as `DRAFT_STEP_ROWS` rows, and each row, drafted or not, costs one.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[_Task, deque[_Kept]] = OrderedDict()
        self._size = 0
        self._texts: WeakValueDictionary[_Task, Text] = WeakValueDictionary()
        """The kept completions of tasks with a follower."""
        likely = np.exp([-4, *(_CLASSES[1:] + _CLASSES[:-1]) / 2, -0.005, -1])
        self._rates = [(trust * likely).tolist() for trust in (0.3, 0.8, 1.0)]
        """How often a token was as expected, by level and class."""
        self.drafted = self.accepted = 0

    def follower(self, task: _Task, prompt: IntArray) -> Follower:
        """What looks for the drafts of a new completion."""
        text = self._texts.get(task)
        if text is None:
            text = self._texts[task] = Text()
            for completion in self._kept.get(task, ()):
                _add(text, completion)
        return Follower(prompt, text)

    def keep(self, task: _Task, prompt: IntArray, tokens: IntArray, log_prob: FloatArray) -> None:
        """Keeps a completion for later ones of its task."""
        completions = self._kept.setdefault(task, deque())
        self._kept.move_to_end(task)
        completion = prompt[1 - _GRAM :].tolist(), tokens[-_TASK_TOKENS:], log_prob[-_TASK_TOKENS:]
        completions.append(completion)
        self._size += len(completion[1])
        text = self._texts.get(task)
        if text is not None:
            _add(text, completion)
            if len(text.tokens) > 4 * _TASK_TOKENS:
                del self._texts[task]  # the next follower gets a new one, without the completions that were dropped
        while len(completions) > _TASK_COMPLETIONS or sum(len(ids) for _, ids, _ in completions) > _TASK_TOKENS:
            self._size -= len(completions.popleft()[1])
        while self._size > _ALL_TOKENS:
            _, dropped = self._kept.popitem(last=False)
            self._size -= sum(len(ids) for _, ids, _ in dropped)

    def advance(self, follower: Follower, tokens: Sequence[int]) -> None:
        """Tells a follower the newest tokens of its completion."""
        follower.advance(tokens, self._rates)

    def choose(
        self, followers: Sequence[Follower], remaining: Sequence[int], live: int, padded: Callable[[int], int]
    ) -> list[list[int]] | None:
        """The drafts of some of the `live` completions in a step, at most `remaining` of each; None if a step without
        drafts is better. `padded` gives the number of rows that a step computes."""
        rate = live / (DRAFT_STEP_ROWS + padded(live))  # tokens for the cost of a step without drafts
        # The tokens of a completion become less likely with depth, so the first of the ranking are whole runs.
        ranked = sorted(
            (-chance, depth, i)
            for i, (follower, most) in enumerate(zip(followers, remaining, strict=True))
            for depth, chance in enumerate(follower.chances(min(most, _DEEPEST), rate * _ROW, self._rates))
        )
        if not ranked:
            return None
        tokens, cost, number = float(live), DRAFT_STEP_ROWS + _OVERHEAD + _ROW * live, 0
        for chance, _, _ in ranked:
            if -chance * cost <= tokens * _ROW:  # with this draft, the tokens for the cost would be fewer
                break
            tokens, cost, number = tokens - chance, cost + _ROW, number + 1
        if tokens <= rate * cost:
            return None
        number = padded(live + number) - live
        depths = [0] * len(followers)
        for _, _, i in ranked[:number]:  # more than worth their cost, where the step is padded anyway
            depths[i] += 1
        return [follower.expected(depth) for follower, depth in zip(followers, depths, strict=True)]
