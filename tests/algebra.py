"""What the laws of the algebra are held on: everything registered, under every option, on a step that has every column.

Legend: B sequences, L tokens (the first one is context), K candidates per token. All numbers of a step are float64 that
float32 can hold, so no law breaks on the way through a batch of float32 arrays.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, get_args, get_origin

import numpy as np
import torch
from annotated_types import Ge, Le
from pydantic import ValidationError
from torch import Tensor
from torch.nn.functional import pad

from trivium.algorithms import PolicyObjective, ValueObjective, catalogue
from trivium.algorithms.correction import OPTIONS, Correction
from trivium.algorithms.metadata import (
    EntropyMetadata,
    FunctionMetadata,
    KlMetadata,
    PairLossMetadata,
    PolicyLossMetadata,
    ScoreLossMetadata,
    TokenWeightMetadata,
    bind_options,
    resolve_function,
)
from trivium.algorithms.objective import Term, TokenWeight
from trivium.algorithms.preference.objective import PreferenceObjective, ScoreObjective
from trivium.config import Plugin, plugin
from trivium.foundation.metrics import checked
from trivium.models.heads.loss import LossDenominators, LossInputs
from trivium.training.batching import count
from trivium.types import EXPERT_VERSION, Batch, Experience

K = 3

# --------------------------------------------------------------------------- what a config can say


def section(room: str, kind: str, **options: Any) -> Plugin:
    """What a config with these words would hold."""
    return plugin(room)({"kind": kind, **options})


def shut(gates: Sequence[Mapping[str, Any]]) -> tuple[TokenWeight, ...]:
    """The gates of a config with these entries."""
    sections = [section("gates", **gate) for gate in gates]
    return tuple(
        TokenWeight(*resolve_function("gates", said, TokenWeightMetadata), narrow=said.narrow) for said in sections
    )


def policy_objective(
    kind: str,
    aggregate: str = "token-mean",
    *,
    gates: Sequence[Mapping[str, Any]] = (),
    weighted: bool = False,
    terms: Mapping[str, Any] | None = None,
    **options: Any,
) -> PolicyObjective:
    """The objective of a config with this policy loss; `terms` are its `entropy`, `kl` and `seed`."""
    said = section("policy_losses", kind, **options)
    loss, metadata = resolve_function("policy_losses", said, PolicyLossMetadata)
    selection = bind_options(metadata.select, said) if metadata.select is not None else None
    return PolicyObjective(
        loss,
        metadata,
        aggregate,
        weighted=weighted,
        token_weights=shut(gates),
        select_tokens=selection,
        **(terms or {}),
    )


@dataclass(frozen=True)
class Variant:
    """A registered function under its defaults, or with one option changed."""

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.kind + "".join(f",{name}={value}" for name, value in self.options.items())


def variants(room: str) -> list[Variant]:
    """Every function of a room, once for all its names: as it is, and with each option at each of a few values."""
    kinds = {id(function): kind for kind, function in reversed(catalogue(room).items())}
    return [variant for kind in reversed(kinds.values()) for variant in variants_of(room, kind)]


def variants_of(room: str, kind: str) -> Iterator[Variant]:
    yield Variant(kind)
    owner = type(section(room, kind))
    for name, option in owner.model_fields.items():
        if name in Plugin.model_fields:
            continue
        for value in other_values(option.annotation, option.metadata, option.default):
            if _legal(owner, kind, name, value):
                yield Variant(kind, {name: value})


def _legal(owner: type[Plugin], kind: str, name: str, value: Any) -> bool:
    try:
        owner.model_validate({"kind": kind, name: value})
    except ValidationError:
        return False
    return True


def other_values(annotation: Any, bounds: Sequence[Any], default: Any) -> list[Any]:
    """Values of an option beside its default; bounds that belong to it are among them."""
    parts = [part for part in get_args(annotation) or (annotation,) if part is not type(None)]
    if all(isinstance(part, str) for part in parts):
        return [part for part in parts if part != default]
    if bool in parts:
        return [not default]
    if get_origin(parts[0]) in (tuple, list, dict):
        return []
    nothing = [None] if type(None) in get_args(annotation) and default is not None else []
    near = [default * 2 if int in parts else default * 0.5] if default else [1 if int in parts else 0.3]
    edges = [bound.ge if isinstance(bound, Ge) else bound.le for bound in bounds if isinstance(bound, Ge | Le)]
    middle = [sum(edges) / 2] if len(edges) == 2 else []
    return [value for value in dict.fromkeys([*nothing, *near, *edges[:1], *middle]) if value != default]


@cache
def objectives(mode: str = "token-mean") -> Mapping[str, Callable[[], Any]]:
    """Everything registered that enters a loss, each as an objective: name -> how it is made.

    KL terms, entropy terms and gates ride on REINFORCE, whose own loss is the simplest.
    """
    made: dict[str, Callable[[], Any]] = {"value": lambda: ValueObjective(0.3, mode)}
    for v in variants("policy_losses"):
        made[f"loss:{v}"] = lambda v=v: policy_objective(v.kind, mode, **v.options)
    for v in variants("kl_estimators"):
        made[f"kl:{v}"] = lambda v=v: policy_objective(
            "reinforce", mode, terms={"kl": _term("kl_estimators", v, KlMetadata)}
        )
    for v in variants("entropies"):
        made[f"entropy:{v}"] = lambda v=v: policy_objective(
            "reinforce", mode, terms={"entropy": _term("entropies", v, EntropyMetadata)}
        )
    for v in variants("gates"):
        gate = {"kind": v.kind, **v.options}
        made[f"gate:{v}"] = lambda gate=gate: policy_objective("reinforce", mode, gates=[gate])
    for kind in catalogue("corrections"):
        said = plugin("corrections", Correction)({"kind": kind})
        if said.active:
            made[f"correction:{kind}"] = lambda said=said: corrected(said, mode)
    for extra in ({"outside": "mask"}, {"outside": "mask_sequence"}, {"normalise": True}, {"threshold": None}):
        for weights in ("token", "sequence"):
            said = Correction(kind="custom", weights=weights, against="current", **extra)
            made[f"correction:{weights},{extra}"] = lambda said=said: corrected(said, mode)
    for option in OPTIONS:
        said = Correction(kind="custom", rejection={option: 1.3}, against="current")
        made[f"correction:{option}"] = lambda said=said: corrected(said, mode)
    if mode == "token-mean":  # pairs are not averaged over tokens
        for v in variants("pair_losses"):
            made[f"pair:{v}"] = lambda v=v: PreferenceObjective(*_chosen("pair_losses", v, PairLossMetadata))
        for v in variants("score_losses"):
            made[f"score:{v}"] = lambda v=v: ScoreObjective(*_chosen("score_losses", v, ScoreLossMetadata))
    return made


def corrected(said: Correction, mode: str) -> PolicyObjective:
    """An objective under a correction: made at each update, or before the step, when a column holds the weights."""
    objective = policy_objective("ppo", mode)
    return replace(objective, correction=said) if said.against == "current" else replace(objective, weighted=True)


def _term(room: str, variant: Variant, metadata: type[KlMetadata] | type[EntropyMetadata]) -> Term:
    return Term(0.2, *_chosen(room, variant, metadata))


def _chosen(room: str, variant: Variant, metadata: type[FunctionMetadata]) -> tuple[Callable[..., Any], Any]:
    return resolve_function(room, section(room, variant.kind, **variant.options), metadata)


# --------------------------------------------------------------------------- a step


HOLES = torch.tensor(
    [[0, 1, 1, 0, 1, 1], [0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1], [0, 1, 0, 0, 0, 0]]
).bool()
"""A mask with holes, an empty row, and a row of a single token."""


def numbers(seed: int, scale: float = 1.0) -> Tensor:
    """Random numbers for the tokens of `HOLES`."""
    return scale * torch.randn(HOLES.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass(frozen=True)
class Step:
    """One mini-batch: every column that a registered function reads, (B, L) each, and the model's answers."""

    mask: Tensor
    columns: Mapping[str, Tensor]
    answers: Mapping[str, Tensor]
    """`log_prob`, `entropy`, `values`, `candidate_log_prob`: what has a gradient."""
    expert: Tensor
    """(B,) bool."""
    groups: tuple[int, ...]
    """(B,): the task of each row; the two rows of a pair follow one another."""
    who: tuple[int, ...]
    """(B,): which row it was before any were moved."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What was measured over the whole step."""

    @cached_property
    def version(self) -> Tensor:
        return torch.where(self.expert.unsqueeze(-1), EXPERT_VERSION, 0).expand(self.mask.shape).int()

    @cached_property
    def totals(self) -> LossDenominators:
        return count(self.batch({"counted"} & self.columns.keys()), self.mask.shape[1])

    def on_policy(self) -> Step:
        """The same step, sampled by the current weights."""
        same = dict.fromkeys(("old_log_prob", "rollout_log_prob"), self.answers["log_prob"])
        return replace(self, columns={**self.columns, **same})

    def rows(self, order: Sequence[int]) -> Step:
        """These rows, in this order."""
        index = torch.tensor(list(order), dtype=torch.int64)
        columns, answers = ({n: t[index] for n, t in ts.items()} for ts in (self.columns, self.answers))
        groups, who = (tuple(names[row] for row in order) for names in (self.groups, self.who))
        return Step(self.mask[index], columns, answers, self.expert[index], groups, who)

    @cached_property
    def experiences(self) -> tuple[Experience, ...]:
        """The rows as the driver holds them."""
        return tuple(
            Experience(
                np.zeros(self.mask.shape[1]),
                self.mask[row].numpy(),
                self.columns["rollout_log_prob"][row].numpy(),
                self.version[row].numpy(),
                f"task-{self.groups[row]}",
                self.who[row],
            )
            for row in range(len(self.mask))
        )

    def batch(self, wanted: Collection[str] = ()) -> Batch:
        """The mini-batch as the driver holds it, with these columns or scores."""
        known = {**self.columns, **{name: self.answers[name].detach() for name in ("log_prob", "entropy")}}
        columns = {name: list(known[name].numpy()) for name in wanted if name in known}
        return Batch(self.experiences).with_columns(**columns)


SPECIAL: dict[str, Callable[[tuple[int, int], torch.Generator], Tensor]] = {}
"""Columns that are not log-probabilities."""


def column(*names: str) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    def register(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        SPECIAL.update(dict.fromkeys(names, make))
        return make

    return register


@column("advantages", "returns", "values")
def _signed(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator)


@column("entropy", "rollout_is_weights")
def _positive(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator).abs()


@column("sum_pi_squared")
def _fraction(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator)


@column("candidate_log_prob")
def _candidates(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randn((*shape, K + 1), generator=generator).log_softmax(-1)[..., :K]


@column("teacher_top", "student_top")
def _teacher(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.stack([torch.arange(K).expand(*shape, K).float(), _candidates(shape, generator)], -1)


def number(name: str, shape: tuple[int, int], seed: int) -> Tensor:
    """What a column of this name holds: log-probabilities unless it is known for something else."""
    generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
    make = SPECIAL.get(name, lambda shape, generator: -0.05 - torch.randn(shape, generator=generator).abs())
    return make(shape, generator).double()


ROOMS = ("policy_losses", "gates", "kl_estimators", "entropies", "pair_losses", "score_losses", "corrections")
ANSWERS = ("log_prob", "entropy", "values", "candidate_log_prob")


@cache
def column_names() -> frozenset[str]:
    """Every column that anything registered reads."""
    all_metadata = [
        function.metadata for room in ROOMS for function in catalogue(room).values() if hasattr(function, "metadata")
    ]
    selections = [
        vars(metadata.select)["metadata"] for metadata in all_metadata if getattr(metadata, "select", None) is not None
    ]
    wanted = frozenset[str]().union(*(metadata.needs for metadata in (*all_metadata, *selections)))
    return wanted | {"rollout_log_prob", "rollout_is_weights", "values", "returns"}


MASK = torch.tensor(
    [
        [0, 1, 1, 0, 1, 1],
        [0, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 0],
        [0, 0, 1, 1, 1, 1],
        [0, 1, 0, 0, 0, 0],
        [0, 1, 1, 1, 0, 1],
    ]
).bool()  # holes, an empty row, a single token


def make_step(mask: Tensor = MASK, seed: int = 0, experts: Sequence[int] = ()) -> Step:
    """A step whose current log-probabilities lie around the old ones: some ratios near one, some far from it.

    `experts` are rows that no policy of this run sampled.
    """
    shape = (mask.shape[0], mask.shape[1])
    columns = {name: number(name, shape, seed) for name in sorted(column_names() - {"uniform", "log_prob", "entropy"})}
    answers = {name: number(name, shape, seed) for name in ANSWERS}
    near = answers["log_prob"] + 0.3 * number("advantages", shape, seed + 1)
    columns["rollout_log_prob"] = (near + 0.05 * number("advantages", shape, seed + 2)).float().double()
    columns["old_log_prob"] = near.float().double()
    expert = torch.zeros(len(mask)).bool()
    expert[list(experts)] = True
    return Step(mask, columns, answers, expert, tuple(row // 2 for row in range(len(mask))), tuple(range(len(mask))))


STEP, EXPERTS = make_step(), make_step(experts=(1, 4))
FRESH = replace(
    STEP,
    columns={
        **STEP.columns,
        "rollout_log_prob": (STEP.answers["log_prob"] + 1e-3 * number("returns", STEP.mask.shape, 3)).float().double(),
    },
)
"""Sampled by an engine that nearly agrees with the trainer."""


def step_for(objective: Any) -> Step:
    """A step on which the objective has something to say: rows of an expert where it tells them apart, an engine that
    nearly agrees where it rejects all others."""
    if getattr(getattr(objective, "metadata", None), "split", False):
        return EXPERTS
    return STEP if selected(objective, STEP).mask.any() else FRESH


# --------------------------------------------------------------------------- an objective on a step


@dataclass(frozen=True)
class Outcome:
    """What a step came to."""

    loss: Tensor
    gradients: dict[str, Tensor]
    """Of each of the model's answers, (B, L) or (B, L, K)."""
    metrics: dict[str, float]
    maxima: dict[str, float]

    def assert_same(self, other: Outcome, rtol: float = 1e-9, atol: float = 1e-12) -> None:
        torch.testing.assert_close(self.loss, other.loss, rtol=rtol, atol=atol)
        torch.testing.assert_close(self.gradients, other.gradients, rtol=rtol, atol=atol)
        for mine, theirs in ((self.metrics, other.metrics), (self.maxima, other.maxima)):
            assert mine.keys() == theirs.keys()
            for key, value in mine.items():  # a tensor for each would take a fifth of the time of these tests
                assert math.isclose(value, theirs[key], rel_tol=rtol, abs_tol=atol), (key, value, theirs[key])

    def assert_finite(self) -> None:
        assert torch.isfinite(self.loss)
        for name, gradient in self.gradients.items():
            assert torch.isfinite(gradient).all(), name
        for key, value in (self.metrics | self.maxima).items():
            assert np.isfinite(value), key


def selected(objective: Any, step: Step) -> Step:
    """The step with what the objective decides over all of it."""
    batch = objective.select(step.batch(objective.needs | objective.looks_at), 0)
    added = {
        name: torch.stack([torch.from_numpy(row.copy()) for row in batch.columns[name]]).double()
        for name in set(batch.columns) - set(step.columns) - {"log_prob", "entropy"}
    }
    mask = torch.stack([torch.from_numpy(e.response_mask.copy()) for e in batch.experiences])
    return replace(step, mask=mask, columns={**step.columns, **added}, metrics=dict(batch.metrics))


def loss_of(
    objective: Any,
    step: Step,
    answers: Mapping[str, Tensor],
    rows: Sequence[int],
    totals: LossDenominators,
    padding: int = 0,
) -> Any:
    """What the objective says about these rows of a selected step, padded on the right."""

    def cut(tensor: Tensor) -> Tensor:
        return pad(tensor[list(rows)], (0, 0) * (tensor.dim() - 2) + (0, padding))

    wanted = {name for name in objective.needs if name in step.columns} | {"rollout_log_prob"}
    return objective.loss(
        LossInputs(
            cut(step.mask),
            cut(step.version),
            {name: cut(step.columns[name]) for name in sorted(wanted)},
            step=3,
            **{name: cut(answer) for name, answer in answers.items()},
        ),
        totals,
    )


def run(
    objective: Any,
    step: Step,
    parts: Sequence[Sequence[int]] | None = None,
    *,
    padding: int = 0,
    dp_size: int = 1,
    select: bool = True,
) -> Outcome:
    """A step done in `parts` (lists of rows; None: all at once), selections first. Every metric must be declared."""
    if select:
        step = selected(objective, step)
    totals = replace(step.totals, dp_size=dp_size)
    answers = {name: answer.detach().clone().requires_grad_(True) for name, answer in step.answers.items()}
    losses: list[Tensor] = []
    sums: dict[str, float] = {}
    maxima: dict[str, float] = {}
    for rows in parts if parts is not None else [range(len(step.mask))]:
        done = loss_of(objective, step, answers, rows, totals, padding)
        losses.append(done.loss)
        for key, value in done.sums.items():
            sums[key] = sums.get(key, 0.0) + float(value)
        for key, value in done.maxima.items():
            maxima[key] = max(maxima.get(key, -np.inf), float(value))
    loss = torch.stack(losses).sum()
    found = torch.autograd.grad(loss, list(answers.values()), allow_unused=True, materialize_grads=True)
    means = {key: value / max(totals.tokens, 1) for key, value in sums.items()}
    metrics = {**objective.derived(means), **step.metrics}
    checked({**metrics, **maxima})
    return Outcome(loss.detach(), dict(zip(answers, found, strict=True)), metrics, maxima)


# --------------------------------------------------------------------------- finite differences


@contextmanager
def detached(answer: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within, `detach` of any tensor is this function."""
    original = Tensor.detach
    Tensor.detach = answer  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        Tensor.detach = original


def held_at(function: Callable[[Tensor], Tensor], at: Tensor) -> Callable[[Tensor], float]:
    """The scalar function with every stop-gradient inside it held at its value at `at`.

    Each `detach` returns what it returned at the base point, so this is the function whose gradient autograd computes.
    """
    original = Tensor.detach
    constants: list[Tensor] = []

    def record(tensor: Tensor) -> Tensor:
        constants.append(original(tensor).clone())
        return constants[-1]

    def held(point: Tensor) -> float:
        left = iter(constants)

        def replay(tensor: Tensor) -> Tensor:
            constant = next(left)
            assert constant.shape == tensor.shape
            return constant

        with detached(replay):
            value = float(function(point))
        assert next(left, None) is None, "the function took another path than at the base point"
        return value

    with detached(record):
        function(at)
    return held


STEP_SIZE = 1e-6


def slope(function: Callable[[Tensor], float], at: Tensor, direction: Tensor) -> float:
    """The derivative of a scalar function along a direction, by central differences."""
    nudge = STEP_SIZE * direction
    return (function(at + nudge) - function(at - nudge)) / (2 * STEP_SIZE)


def finite_differences(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """The gradient of a scalar function, stop-gradients held, coordinate by coordinate."""
    held = held_at(function, at)
    axes = torch.eye(at.numel(), dtype=at.dtype).view(-1, *at.shape)
    return torch.tensor([slope(held, at, axis) for axis in axes], dtype=at.dtype).view(at.shape)
