"""The config section of off-policy correction: importance weights and rejection for tokens that another policy than the
trainer's sampled. `importance_weights` computes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from trivium.config import Plugin, RunConfig, merged
from trivium.foundation.errors import Problem
from trivium.foundation.registry import suggest

OPTIONS = tuple(
    f"{level}_{estimator}" for level in ("token", "seq_sum", "seq_mean", "seq_max") for estimator in ("k1", "k2", "k3")
)
"""Statistics for rejection: estimates of KL(engine, trainer) of a token, or their sum, mean or maximum by sequence."""
Bounds = tuple[float, float]


class Correction(Plugin):
    """The off-policy correction of the loss, for tokens that the trainer's current weights did not sample."""

    weights: Literal["none", "token", "sequence"] = "none"
    """Importance weights on the policy loss: the ratio of each token, or the product over the sequence."""
    threshold: float | tuple[float, float] | None = 2.0
    """Bounds of the ratio: [low, high], or one number for high alone (and its inverse for low where ratios outside are
    masked); null for none."""
    outside: Literal["truncate", "mask", "mask_sequence"] = "truncate"
    """What happens to a ratio outside the bounds: `truncate` sets it to the bound; `mask` sets its weight to 0, and the
    token still counts in the mean; `mask_sequence` sets all weights of a sequence to 0 if the geometric mean of its
    ratios is outside, and changes no other weight."""
    normalise: bool = False
    """Whether to divide the weights by their mean over the batch (over its tokens, or its sequences)."""
    rejection: dict[str, float | tuple[float, float]] = Field(default={})
    """Bounds that a token must satisfy to stay in the mask, and so in the mean: `{seq_mean_k1: [0.999, 1.001],
    token_k2: 0.5}`. The bounds of k1 are ratios engine / trainer (the inverse of the weights' ratio; one number u means
    [1/u, u]); those of k2 and k3 are upper bounds in nats. A token must satisfy every entry.
    `seq_max_k1: [1.0e-9, 1.0e4]` rejects sequences with a token that is 10^4 times more probable to the engine."""
    against: Literal["old", "current"] = "old"
    """The trainer log-probabilities that are compared with the engine's: `old` those at the start of the step (computed
    in a pass before it; they are then the denominator of the policy loss's ratio too), `current` those of the current
    weights at every update."""

    @property
    def active(self) -> bool:
        """Whether it does anything."""
        return self.weights != "none" or bool(self.rejection)

    @property
    def decoupled(self) -> bool:
        """Whether three policies are distinguished: the engine's, the old and the current one."""
        return self.active and self.against == "old"

    @property
    def live(self) -> bool:
        """Whether the current weights and the token's own sequence determine its weight, without a further pass."""
        return self.active and self.against == "current" and not self.rejection and not self.normalise

    @property
    def bounds(self) -> Bounds:
        """The lowest and highest weight that the correction leaves unchanged."""
        if self.threshold is None:
            return 0.0, math.inf
        if isinstance(self.threshold, tuple):
            return self.threshold
        return 0.0 if self.outside == "truncate" else 1 / self.threshold, self.threshold

    @property
    def judged(self) -> Bounds:
        """The bounds for the logged fractions of ratios above and below; `low` is 1 / high if only `high` is used."""
        return (0.0, math.inf) if self.threshold is None else interval(self.threshold)

    @property
    def words(self) -> str:
        """A description of the correction for people."""
        return "; ".join([*self._weights_in_words(), *self._rejection_in_words()]) or "none"

    def _weights_in_words(self) -> Iterator[str]:
        if self.weights == "none":
            return
        low, high = self.bounds
        interval = f"{high}" if low == 0 and self.outside == "truncate" else _written(self.bounds)
        outside = {
            "truncate": f" truncated at {interval}",
            "mask": f", zero outside {interval}",
            "mask_sequence": f", zero for sequences whose geometric mean is outside {interval}",
        }[self.outside]
        mean = ", divided by their mean" if self.normalise else ""
        yield f"{self.weights} importance weights{self._whose}{'' if self.threshold is None else outside}{mean}"

    def _rejection_in_words(self) -> Iterator[str]:
        for option, bound in self.rejection.items():
            what = "tokens" if option.startswith("token") else "sequences"
            outside = f"outside {_written(interval(bound))}" if option.endswith("k1") else f"above {bound}"
            yield f"{what} rejected where {option}{self._whose} is {outside}"

    @property
    def _whose(self) -> str:
        return " of the current policy" if self.against == "current" else ""

    def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        """Invalid bounds, and keys without effect."""
        del run
        if self.kind in ("auto", "none"):
            for name in self._changed():
                yield Problem(
                    f"{where}.{name}",
                    f"the {name} of a correction of kind {self.kind!r}",
                    "it has no options",
                    "leave `kind` out, or name another",
                )
            return
        if not self.active:
            yield Problem(
                where, "a correction", "neither weights nor rejection", "say one of them, or correction: none"
            )
        yield from self._weights_problems(where)
        for option, bound in self.rejection.items():
            yield from _rejection_problems(option, bound, f"{where}.rejection.{option}")

    def _weights_problems(self, where: str) -> Iterator[Problem]:
        idle = [name for name in ("threshold", "outside", "normalise") if name in self._changed()]
        if self.weights == "none":
            for name in idle:
                yield Problem(
                    f"{where}.{name}", f"{name} of importance weights", "there are none", f"set {where}.weights"
                )
        elif self.threshold is None and self.outside != "truncate":
            yield Problem(f"{where}.outside", f"outside: {self.outside}", "no threshold", f"set {where}.threshold")
        elif self.threshold is not None and not _around_one(self.threshold):
            yield Problem(
                f"{where}.threshold",
                f"weights bounded by {self.threshold}",
                "a fresh token's ratio is 1",
                "use one number above 1, or [low, high] around 1",
            )

    def _changed(self) -> list[str]:
        """The keys that differ from their default."""
        fields = type(self).model_fields
        return [name for name in fields if name != "kind" and getattr(self, name) != fields[name].default]


def interval(bound: float | Bounds) -> Bounds:
    """The bounds as (low, high): one number u stands for (1 / u, u)."""
    return bound if isinstance(bound, tuple) else (1 / bound, bound)


def _around_one(bound: float | Bounds) -> bool:
    """Whether the interval contains 1, the ratio of a fresh token, and other values."""
    low, high = bound if isinstance(bound, tuple) else (0.0, bound)
    return 0 <= low <= 1 <= high and low < high != 1


def _written(bounds: Bounds) -> str:
    return f"[{round(bounds[0], 4)}, {round(bounds[1], 4)}]"


def _rejection_problems(option: str, bound: float | Bounds, where: str) -> Iterator[Problem]:
    if option not in OPTIONS:
        yield Problem(where, f"the rejection option {option!r}", "no such option", suggest(option, OPTIONS))
    elif option.endswith("k1"):
        if not _around_one(bound) or interval(bound)[0] == 0:
            yield Problem(
                where,
                f"a ratio bounded by {bound}",
                "a fresh token's ratio is 1",
                "use one number above 1, or [low, high] around 1 with low above 0",
            )
    elif isinstance(bound, tuple) or bound <= 0:
        yield Problem(where, f"the bounds {bound}", "k2 and k3 are never negative", "give one upper bound above 0")


@dataclass(frozen=True)
class NamedCorrection:
    """A correction that a config can name; keys in the config override its own."""

    says: Mapping[str, Any]
    """A partial section."""
    source: str
    """The paper, or a description."""

    def configure(self, data: Mapping[str, Any]) -> Correction:
        """The section with the config's keys merged in. Raises pydantic's ValidationError."""
        return Correction.model_validate(merged(self.says, data))


_TOKEN = {"weights": "token", "threshold": 2.0}
_SEQUENCE = {"weights": "sequence", "threshold": 2.0}
_GEOMETRIC = {"rejection": {"seq_mean_k1": [0.999, 1.001]}}
_K3 = {"rejection": {"seq_mean_k3": 0.01}}
_CURRENT = {"against": "current"}
_AREAL = "decoupled PPO, Hilton et al. 2021; AReaL, Fu et al. 2025"
_TIS = "truncated importance sampling between an engine and its trainer, Yao et al. 2025"
_COLLAPSE = "Liu et al. 2025, When Speed Kills Stability"
_PRODUCT = f"the product of the ratios of a sequence, {_COLLAPSE}"
_GEO = f"rejection by the geometric mean of the ratios of a sequence, {_COLLAPSE}"
_ESTIMATE = "rejection by an estimate of the KL, Schulman 2020"
AUTO = NamedCorrection({}, "no correction for fresh groups, token weights if groups may be stale")
NONE = NamedCorrection({}, "nothing is corrected")
CUSTOM = NamedCorrection({}, "only the keys of the section")
DECOUPLED_TOKEN_IS = NamedCorrection(_TOKEN, _AREAL)
DECOUPLED_SEQ_IS = NamedCorrection(_SEQUENCE, _PRODUCT)
DECOUPLED_SEQ_IS_RS = NamedCorrection({**_SEQUENCE, "rejection": {"seq_sum_k1": [0.5, 2.0]}}, _PRODUCT)
DECOUPLED_GEO_RS = NamedCorrection(_GEOMETRIC, _GEO)
DECOUPLED_GEO_RS_SEQ_TIS = NamedCorrection({**_SEQUENCE, **_GEOMETRIC}, _GEO)
DECOUPLED_GEO_RS_TOKEN_TIS = NamedCorrection({**_TOKEN, **_GEOMETRIC}, _GEO)
DECOUPLED_K3_RS = NamedCorrection(_K3, _ESTIMATE)
DECOUPLED_K3_RS_SEQ_TIS = NamedCorrection({**_SEQUENCE, **_K3}, _ESTIMATE)
DECOUPLED_K3_RS_TOKEN_TIS = NamedCorrection({**_TOKEN, **_K3}, _ESTIMATE)
# The ratio of the loss (or the weights, if the loss has no ratio) is relative to the engine.
BYPASS_TOKEN_IS = NamedCorrection({**_TOKEN, **_CURRENT}, _TIS)
BYPASS_SEQ_IS = NamedCorrection({**_SEQUENCE, **_CURRENT}, _PRODUCT)
BYPASS_GEO_RS = NamedCorrection({**_GEOMETRIC, **_CURRENT}, _GEO)
BYPASS_GEO_RS_SEQ_TIS = NamedCorrection({**_SEQUENCE, **_GEOMETRIC, **_CURRENT}, _GEO)
BYPASS_GEO_RS_TOKEN_TIS = NamedCorrection({**_TOKEN, **_GEOMETRIC, **_CURRENT}, _GEO)
BYPASS_K3_RS = NamedCorrection({**_K3, **_CURRENT}, _ESTIMATE)
