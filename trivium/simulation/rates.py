"""The rates of a machine: how long sampling, training and exchanges of weights take. Read from runs, kept in a file."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, Self

import numpy as np
from pydantic import Field, ValidationError

from trivium.config import read_yaml
from trivium.config.choices import MAX_ROWS
from trivium.config.reading import flatten
from trivium.config.schema import Config
from trivium.errors import ConfigError, RunDirError
from trivium.inspection.rollouts import read_rollouts
from trivium.inspection.run import RecordedRun
from trivium.inspection.viewer.timeline import Span, read_spans
from trivium.policy import ENGINE_S, REWARD_S, ROLLOUT_S
from trivium.types import Trajectory

_QUANTILES = np.linspace(0, 1, 101)
_WARM = 2
"""The first steps of a run, which compile, allocate and fill caches, are left out if this many others follow."""

Seconds = Annotated[float, Field(ge=0)]
Quantiles = Annotated[tuple[float, ...], Field(min_length=1)]


class Rates(Config):
    """What `trivium simulate` knows about a machine and about the rollouts of a run. A distribution is a list of
    equally spaced quantiles, from the smallest to the largest value; one value is a constant."""

    start_s: Seconds
    """Seconds from a request to its first token, prefill included."""
    step_s: Seconds
    """Seconds of one decoding step of an engine, apart from what its rows add."""
    row_s: Seconds
    """Seconds that each row in flight adds to a decoding step: an engine makes at most 1 / row_s tokens a second."""
    max_rows: int = Field(default=256, ge=1)
    """Rows that an engine decodes at once; further requests wait."""
    load_s: Seconds
    """Seconds in which an engine loads a version."""
    update_s: Seconds
    """Seconds of a train step, apart from what its tokens add."""
    update_token_s: Seconds
    """Seconds that each token adds to a train step on one rank, prompts included."""
    score_token_s: Seconds = 0.0
    """Seconds that each token takes in a scoring pass (reference, critic, ...) on one rank."""
    sync_s: Seconds
    """Seconds in which the trainer publishes a version."""
    save_s: Seconds
    """Seconds in which the trainer writes a checkpoint."""
    prompt_tokens: Quantiles
    """Tokens of the first prompt of a rollout."""
    response_tokens: Quantiles
    """Tokens that the policy samples in one turn."""
    turns: Quantiles = (1.0,)
    """Turns of a rollout."""
    environment_s: Quantiles = (0.0,)
    """Seconds that a rollout spends outside of the engine: environments, tools, rewards, the workflow itself."""
    equal_groups: float = Field(default=0.0, ge=0, le=1)
    """Part of the groups whose members all get the same reward. A filter of the algorithm may refuse them."""
    shared_speed: float = Field(default=0.3, gt=0, le=1)
    """How fast engine and trainer are while both compute in one process on one device; 1 alone. 0.3 was measured on two
    cores, where both also wait for one interpreter. It applies to local runs without train.own_process."""
    own_process_speed: float = Field(default=0.5, gt=0, le=1)
    """The same with train.own_process: 1 if engine and trainer have devices of their own, 0.5 if they take turns on the
    cores of one CPU."""
    rank_efficiency: float = Field(default=0.9, gt=0, le=1)
    """Speed that is left of a train step, for each rank, each time that the number of ranks doubles. An assumption."""
    explorer_gpus: float = Field(default=1.0, gt=0)
    """GPUs of an explorer, which decide the cheapest split."""
    rank_gpus: float = Field(default=1.0, gt=0)
    """GPUs of a training rank."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads a file of rates. Raises ConfigError if it is missing or has wrong keys or values."""
        try:
            return cls.model_validate(read_yaml(path))
        except ValidationError as error:
            problems = [*flatten(error, cls, "")]
            raise ConfigError(f"the rates in {path}", f"{len(problems)} problem(s)", "correct it:", problems) from error

    @classmethod
    def instant(cls) -> Self:
        """The rates of a machine on which nothing takes time."""
        needed = {name: 0.0 for name, field in cls.model_fields.items() if field.is_required()}
        return cls.model_validate({**needed, "prompt_tokens": (1.0,), "response_tokens": (1.0,)})

    def to_yaml(self) -> str:
        """The rates as YAML, each under a comment with its meaning."""
        lines: list[str] = []
        for name, field in type(self).model_fields.items():
            value: Any = getattr(self, name)
            text = f"[{', '.join(map(_rounded, value))}]" if isinstance(value, tuple) else _rounded(value)
            lines += [f"# {line}" for line in textwrap.wrap(field.description or "", 118)]
            lines += textwrap.wrap(f"{name}: {text}", 120, subsequent_indent="  ")
        return "\n".join(lines) + "\n"

    def mean(self, name: str) -> float:
        """The mean of a distribution."""
        values = getattr(self, name)
        return fmean([(low + high) / 2 for low, high in pairwise(values)] or values)


def _rounded(value: float) -> str:
    return str(value if isinstance(value, int) else float(f"{value:.3g}"))


# --------------------------------------------------------------------------- from runs


def measure(run_dirs: Sequence[Path]) -> Rates:
    """Reads the rates of finished synchronous runs on one machine. The cost of a row holds for as many rows as the runs
    had in flight: the cost of more rows is higher or lower in real engines.

    Raises RunDirError for an asynchronous run, or if no run has recorded rollouts.
    """
    rows, spans, max_rows = list[Mapping[str, float]](), list[Span](), 1
    waves = defaultdict[tuple[Path, int], list[Trajectory]](list)
    for path in run_dirs:
        run = RecordedRun.open(path)
        config = run.config.stage_configs()[-1]
        if config.max_staleness > 0:
            found = f"schedule.max_staleness {config.max_staleness}: engine and trainer slow each other down"
            raise RunDirError(f"the rates of {path}", found, "profile a synchronous run: schedule.max_staleness=0")
        trained = [row for row in run.rows() if "time/update/policy" in row]
        trained = trained[_WARM:] if len(trained) > 2 * _WARM else trained
        for rollout in read_rollouts(path, step={int(row["step"]) for row in trained}) if trained else ():
            if rollout.trajectory.turns and ENGINE_S in rollout.trajectory.metrics:
                waves[path, rollout.steps[0]].append(rollout.trajectory)
        rows, spans = [*rows, *trained], [*spans, *read_spans(path)]
        max_rows = max(max_rows, getattr(config.engine, "max_rows", 256) or MAX_ROWS)
    if not waves:
        found = "no trained step with recorded rollouts"
        raise RunDirError(f"the rates of {', '.join(map(str, run_dirs))}", found, "name directories of finished runs")
    rollouts = [rollout for wave in waves.values() for rollout in wave]
    metrics = [rollout.metrics for rollout in rollouts]
    start_s, step_s, row_s = fit([row for wave in waves.values() for row in _requests(wave)])
    update_s, update_token_s = fit([((1.0, _tokens(row)), _update_s(row)) for row in rows])
    return Rates(
        start_s=start_s,
        step_s=step_s,
        row_s=row_s,
        max_rows=max_rows,
        load_s=median(span.stop - span.start for span in spans if span.name == "load weights"),
        update_s=update_s,
        update_token_s=update_token_s,
        score_token_s=_mean(_mean(_scores(row)) / _tokens(row) for row in rows),
        sync_s=_mean(row["time/sync"] for row in rows if "time/sync" in row),
        save_s=_mean(span.stop - span.start for span in spans if span.name == "checkpoint"),
        prompt_tokens=_quantiles([len(rollout.turns[0].prompt_tokens) for rollout in rollouts]),
        response_tokens=_quantiles([len(turn.tokens) for rollout in rollouts for turn in rollout.turns]),
        turns=_quantiles([len(rollout.turns) for rollout in rollouts]),
        environment_s=_quantiles([max(0.0, m[ROLLOUT_S] - m[ENGINE_S]) + m[REWARD_S] for m in metrics]),
        equal_groups=_mean(row["reward/equal_groups"] for row in rows if "reward/equal_groups" in row),
    )


Row = tuple[tuple[float, ...], float]
"""(columns, seconds that are a sum of them with unknown factors)."""


def _requests(wave: Sequence[Trajectory]) -> Iterator[Row]:
    """For each of the rollouts that begin together ((turns, tokens, rows in flight summed over its tokens), seconds in
    the engine)."""
    lengths = np.sort([rollout.num_tokens for rollout in wave])
    in_flight = len(wave) - np.searchsorted(lengths, np.arange(1, lengths[-1] + 1))
    rows = [0.0, *np.cumsum(in_flight).tolist()]
    for rollout in wave:
        yield (len(rollout.turns), rollout.num_tokens, rows[rollout.num_tokens]), rollout.metrics[ENGINE_S]


def _tokens(row: Mapping[str, float]) -> float:
    return (row["rollout/prompt_tokens"] + row["rollout/response_tokens"]) * row["rollout/trajectories"]


def _scores(row: Mapping[str, float]) -> list[float]:
    return [seconds for name, seconds in row.items() if name.startswith("time/score/")]


def _update_s(row: Mapping[str, float]) -> float:
    """Seconds of a train step without scores."""
    return row["time/step"] - row.get("time/wait", 0.0) - sum(_scores(row))


def fit(rows: Sequence[Row]) -> tuple[float, ...]:
    """Least squares of relative errors, with factors that are not negative: large runs count as much as small ones. A
    column that the others determine gets the factor 0."""
    seconds = np.maximum([value for _, value in rows], 1e-6)
    columns = np.array([row for row, _ in rows]) / seconds[:, None]
    used = [n for n in range(columns.shape[1]) if columns[:, n].any()]
    while used:
        scale = columns[:, used].max(axis=0)
        factors, _, rank, _ = np.linalg.lstsq(columns[:, used] / scale, np.ones(len(rows)), rcond=1e-6)
        if rank == len(used) and (factors >= 0).all():
            result = np.zeros(columns.shape[1])
            result[used] = factors / scale
            return tuple(float(factor) for factor in result)
        # Of columns that say the same, the later one stays: a saturated engine promises less than an idle one.
        del used[int(np.argmin(factors)) if rank == len(used) else 0]
    return (0.0,) * columns.shape[1]


def _quantiles(values: Sequence[float]) -> tuple[float, ...]:
    quantiles = np.quantile(values, _QUANTILES).tolist()
    return (quantiles[0],) if quantiles[0] == quantiles[-1] else tuple(quantiles)


def _mean(values: Any) -> float:
    listed = list(values)
    return float(fmean(listed)) if listed else 0.0
