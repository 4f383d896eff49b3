"""Scores of a reward model for whole sequences of tokens and images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from trivium.foundation.errors import DataError
from trivium.models.backbone.load import max_positions
from trivium.models.backbone.packed import pack
from trivium.models.backbone.prefixes import Prefixes
from trivium.models.backbone.sight import Seen, Sight
from trivium.models.heads.trained_models import ScoreModel
from trivium.models.vision.encoder import pixel_reader, refuse_images
from trivium.types import IntArray, Media


@dataclass(frozen=True, slots=True)
class Conversation:
    """Tokens of a prompt and its completion, and the images among them."""

    tokens: IntArray
    media: tuple[Media, ...] = ()


class SequenceScorer:
    """Scores sequences by a reward model.

    By default, each pass has one sequence. With `max_tokens`, a pass has several, up to this many tokens; a score then
    depends on the other sequences of its pass, by rounding errors. Shared prefixes of text are computed once.
    """

    def __init__(self, model: ScoreModel, *, model_dir: Path | None = None, max_tokens: int = 1) -> None:
        """`model_dir` has the processor for images."""
        self.model = model
        vision = model.backbone.vision
        self._sight = None if vision is None or model_dir is None else Sight(vision, pixel_reader(model_dir))
        self._max_tokens = max_tokens

    @torch.no_grad()
    def scores(self, sequences: Sequence[Seen]) -> list[float]:
        """The score of the last token of each sequence. Raises DataError for a sequence that is too long, and for
        images that the model does not support."""
        self._check(sequences)
        return [score for some in self._passes(sequences) for score in self._pass(some)]

    def _check(self, sequences: Sequence[Seen]) -> None:
        limit = max_positions(self.model.module)
        longest = max((len(sequence.tokens) for sequence in sequences), default=0)
        if limit is not None and longest > limit:
            raise DataError(
                f"a score for a conversation of {longest} tokens",
                f"the reward model was built for {limit} (max_position_embeddings)",
                "lower the length of completions, leave out the longest tasks, or use another reward model",
            )
        if self._sight is not None:
            self._sight.check(sequences)
        elif any(sequence.media for sequence in sequences):
            raise refuse_images(self.model.module)

    def _passes(self, sequences: Sequence[Seen]) -> Iterator[list[Seen]]:
        some: list[Seen] = []
        for sequence in sequences:
            if some and sum(len(member.tokens) for member in [*some, sequence]) > self._max_tokens:
                yield some
                some = []
            some.append(sequence)
        if some:
            yield some

    def _pass(self, sequences: Sequence[Seen]) -> list[float]:
        tokens = [sequence.tokens for sequence in sequences]
        # Equal placeholders may stand for different images, so sequences with images share no tokens.
        alone = not self.model.backbone.packs or any(sequence.media for sequence in sequences)
        tree = None if alone else Prefixes(tokens).tree(range(len(tokens)))
        packed = pack(tokens, self.model.device, tree)
        if self._sight is not None:
            packed = self._sight.shown(packed, sequences)
        last = np.cumsum(packed.lengths) - 1
        return self.model(packed, packed.rows[torch.from_numpy(last).to(self.model.device)]).float().tolist()
