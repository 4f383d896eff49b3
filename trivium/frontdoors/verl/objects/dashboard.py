"""Logs metrics under verl's names in addition to Trivium's. A table maps the names of equal metrics. The metrics that
only verl has are computed from a step's rollouts and experiences.

Every name is declared like any other metric. A metric that is not measured is left out of the row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trivium.algorithms.algorithm import GroupAlgorithm
from trivium.algorithms.batches import column, padded
from trivium.algorithms.kl import apply_kl_penalty
from trivium.frontdoors.verl.objects.algorithms.rollout_corr_helper import OFF_POLICY, REJECTION, WEIGHTS
from trivium.frontdoors.verl.objects.batches.batch_view import BatchView, living, row_lengths
from trivium.metrics import declare, declared
from trivium.protocols import Monitor
from trivium.schedule import OrderedTasks, Schedule
from trivium.training.balance import partition, workload
from trivium.types import Batch, Group, Metrics

Numbers = npt.NDArray[np.float64]

_ARRAYS = {"advantages": "advantage", "returns": "return", "values": "value"}
_TRAINED = {
    **{f"critic/{name}/{of}": f"train/{ours}_{of}" for name, ours in _ARRAYS.items() for of in ("mean", "max", "min")},
    "critic/vf_loss": "train/loss/value",
    "critic/vf_clipfrac": "train/value_clip_fraction",
    "critic/vpred_mean": "train/value_predicted",
    "critic/grad_norm": "train/grad_norm/value",
    "critic/lr": "train/lr/value",
    "actor/pg_loss": "train/loss/policy",
    "actor/pg_clipfrac": "train/clip_fraction",
    "actor/pg_clipfrac_lower": "train/clip_fraction_lower",
    "actor/ppo_kl": "train/kl",
    "actor/entropy": "train/entropy",
    "actor/entropy_loss": "train/loss_term/entropy",
    "actor/kl_loss": "train/loss_term/kl",
    "actor/kl_coef": "train/kl_coef",
    "actor/grad_norm": "train/grad_norm/policy",
    "actor/lr": "train/lr/policy",
    "actor/reward_kl_penalty": "train/ref_kl",
    "actor/reward_kl_penalty_coeff": "train/kl_coef",
}
_CORRECTION = {
    **OFF_POLICY,
    **{f"rollout_is_{theirs}": f"weight/{ours}" for theirs, ours in WEIGHTS.items()},
    "rollout_rs_masked_fraction": "rejected_tokens",
    "rollout_rs_seq_masked_fraction": "rejected_sequences",
}
_TIMES = {
    "step": "step",
    "old_log_prob": "score/old",
    "ref": "score/ref",
    "values": "score/values",
    "adv": "advantage",
    "update_critic": "update/critic",
    "update_actor": "update/policy",
    "update_weights": "sync",
    "testing": "evaluate",
    "save_checkpoint": "checkpoint",
}
NAMES: dict[str, str] = {
    **_TRAINED,
    **{f"rollout_corr/{theirs}": f"mismatch/{ours}" for theirs, ours in _CORRECTION.items()},
    **{f"timing_s/{theirs}": f"time/{ours}" for theirs, ours in _TIMES.items()},
    "perf/time_per_step": "time/step",
}
"""verl's name -> the Trivium metric with the same meaning."""
_PER_TOKEN = ("ref", "values", "adv", "update_critic", "update_actor")
"""Phases whose time is also given per token of prompts and responses."""

for _theirs, _ours in NAMES.items():
    _meaning = declared(_ours)
    declare(
        _theirs,
        f"the same as `{_ours}`",
        unit=_meaning.unit,
        aggregation=_meaning.aggregation,
        better=_meaning.better,
        machine=_theirs.startswith("timing_s/"),
    )
declare("rollout_corr/rollout_rs_*", "the same as `mismatch/rejection/<option>/...`")
declare("rollout_corr/log_ppl_diff_min", "the smallest of the differences whose mean is `rollout_corr/log_ppl_diff`")
declare("critic/score/*", "mean, max or min of a rollout's reward", better="up")
declare("critic/rewards/*", "mean, max or min of a rollout's reward less the KL penalty on it", better="up")
declare("critic/vf_explained_var", "explained variance of the returns by the values", better="up")
declare(
    "response_length/*", "mean, max or min of a response, and the fraction at the limit (clip_ratio)", unit="tokens"
)
declare("response/aborted_ratio", "fraction of rollouts without a response", better="down")
declare("prompt_length/*", "mean, max or min of a prompt, and the fraction at the limit (clip_ratio)", unit="tokens")
declare("num_turns/*", "mean, max or min of the messages of a rollout, its prompt counted as one")
declare("training/global_step", "train steps so far", aggregation="last")
declare("training/epoch", "the epoch, from 0", aggregation="last")
declare(
    "training/rollout_probs_diff_*", "distance of engine and trainer in a trained token's probability: max, mean, std"
)
declare("training/rollout_actor_probs_pearson_corr", "correlation of the engine's and the trainer's probabilities")
declare("global_seqlen/*", "tokens of a data rank: as rows come (min, max, minmax_diff), as shared (balanced_), mean")
declare("timing_s/gen", "waiting for rollouts, without their rewards", unit="s", aggregation="sum", machine=True)
declare("timing_s/reward", "the rewards of a step", unit="s", aggregation="sum", machine=True)
declare("timing_per_token_ms/*", "time of a phase per token (of gen: per token of responses)", unit="ms", machine=True)
declare("perf/total_num_tokens", "tokens of the step's prompts and responses", unit="tokens", aggregation="sum")
declare("perf/throughput", "those tokens per second and process", unit="tokens/s", better="up")
declare(
    "val-core/*",
    "validation: `<data source>/<variable>/<statistic>` of the samples of a task, at the most samples: mean@N, and "
    "best@N and maj@N over all choices of N",
    better="up",
)
declare("val-aux/*", "the other statistics and variables of a validation, and the turns of its samples")


@dataclass
class Dashboard:
    """A monitor that adds verl's names to every row."""

    monitor: Monitor
    processes: int
    """Number of processes in the resource pools."""
    max_response_length: int
    max_prompt_length: int | None = None
    """None if no limit is set."""
    steps_per_epoch: int = 1
    _measured: Metrics = field(default_factory=dict[str, float], init=False)
    """Metrics of the step in progress, from its rollouts and experiences."""
    _rewards: tuple[Numbers, Numbers] | None = field(default=None, init=False)
    """(reward of each sequence, sum of its KL estimates); None if a shaping changes the rewards."""
    _tokens: tuple[float, float] = field(default=(0.0, 0.0), init=False)
    """Numbers of tokens of the step's prompts and responses."""

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Adds metrics of the step in progress. Values with the same `timing_s/` name are summed."""
        for name, value in metrics.items():
            self._measured[name] = self._measured.get(name, 0.0) + value if name.startswith("timing_s/") else value

    def keep(self, algorithm: GroupAlgorithm, groups: Sequence[Group], batch: Batch) -> None:
        """Measures a step's groups, and its experiences before the first update."""
        kept = {experience.group_id for experience in batch.experiences}
        trained = [group for group in groups if group.group_id in kept and not group.expert]
        self.observe(rollout_metrics(trained, self.max_response_length, self.max_prompt_length))
        self.observe(value_metrics(batch))
        if algorithm.recompute_old and "old_log_prob" in batch.columns:
            self.observe(probability_metrics(batch))
        prompts, responses = row_lengths(trained)
        self._tokens = float(sum(prompts)), float(sum(responses))
        self._rewards = None if algorithm.shapings else penalised(algorithm, algorithm.batch(trained), batch)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        row = renamed(metrics)
        if "train/version" in metrics:
            row |= self._of_step(step, metrics)
        self.monitor.log(step, {**row, **metrics})

    def _of_step(self, step: int, metrics: Mapping[str, float]) -> Metrics:
        row, self._measured = self._measured, {}
        if self._rewards is not None:
            rewards, kl = self._rewards
            row |= spread("critic/rewards", rewards - metrics["train/kl_coef"] * kl if kl.any() else rewards)
        row |= {"training/global_step": step, "training/epoch": (step - 1) // self.steps_per_epoch}
        if "time/wait" in metrics:
            row["timing_s/gen"] = max(0.0, metrics["time/wait"] - row.get("timing_s/reward", 0.0))
        return row | throughput({**renamed(metrics), **row}, *self._tokens, self.processes)

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self.monitor.table(step, name, rows)

    def state(self) -> dict[str, Any]:
        return self.monitor.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.monitor.restore(state)

    def close(self) -> None:
        self.monitor.close()


def epoch_steps(schedule: Schedule) -> int:
    """Returns the number of train steps of an epoch, at least 1."""
    tasks = schedule.tasks
    length = tasks.epoch_length if isinstance(tasks, OrderedTasks) else len(tasks)
    return max(1, length // schedule.groups_per_step)


def renamed(metrics: Mapping[str, float]) -> Metrics:
    """Returns the metrics that verl has under another name, under that name."""
    row = {theirs: metrics[ours] for theirs, ours in NAMES.items() if ours in metrics}
    in_loss = "train/loss_term/kl" in metrics
    for name in ("actor/reward_kl_penalty", "actor/reward_kl_penalty_coeff") if in_loss else ("actor/kl_coef",):
        row.pop(name, None)
    if "train/loss_term/policy_gradient" in metrics:
        row["actor/pg_loss"] = metrics["train/loss_term/policy_gradient"]
    if "mismatch/log_perplexity_gap_below" in metrics:
        row["rollout_corr/log_ppl_diff_min"] = -metrics["mismatch/log_perplexity_gap_below"]
    for key, value in metrics.items():
        area, _, rest = key.partition("mismatch/rejection/")
        if not area and rest:
            option, _, statistic = rest.partition("/")
            row |= {f"rollout_corr/rollout_rs_{option}_{t}": value for t, o in REJECTION.items() if o == statistic}
    return row


def spread(where: str, values: Numbers) -> Metrics:
    """Returns mean, max and min, or an empty mapping without values."""
    if not len(values):
        return {}
    return {
        f"{where}/mean": float(values.mean()),
        f"{where}/max": float(values.max()),
        f"{where}/min": float(values.min()),
    }


def rollout_metrics(groups: Sequence[Group], max_response_length: int, max_prompt_length: int | None) -> Metrics:
    """Returns rewards, lengths and turns of the rollouts that did not fail. An empty response has no score."""
    members = living(groups)
    if not members:
        return {}
    prompts, responses = (np.array(lengths, np.float64) for lengths in row_lengths(groups))
    scores = [t.reward for (_, t), length in zip(members, responses, strict=True) if length and t.rewards]
    metrics = {
        **spread("critic/score", np.array(scores, np.float64)),
        **spread("response_length", responses),
        "response_length/clip_ratio": float((responses >= max_response_length).mean()),
        "response/aborted_ratio": float((responses == 0).mean()),
        **spread("prompt_length", prompts),
        **spread("num_turns", np.array([2 * len(t.turns) for _, t in members], np.float64)),
    }
    if max_prompt_length is not None:
        metrics["prompt_length/clip_ratio"] = float((prompts >= max_prompt_length).mean())
    return metrics


def penalised(algorithm: GroupAlgorithm, whole: Batch, batch: Batch) -> tuple[Numbers, Numbers] | None:
    """Returns (reward of each sequence, sum of its KL estimates, which is zero without a KL penalty in the reward).

    `whole` holds the sequences as sampled. In `batch`, a correction may have rejected tokens.
    """
    estimator = algorithm.estimator
    if estimator is None or len(whole) != len(batch):
        return None
    rewards = np.array([e.reward for e in whole.experiences], np.float64)
    if estimator.kl_controller is None or not len(whole):
        return rewards, np.zeros(len(rewards))
    mask = padded([e.response_mask for e in whole.experiences]).bool()
    old, reference = (column(batch, name).double() for name in ("old_log_prob", "ref_log_prob"))
    negative, _ = apply_kl_penalty(old.new_zeros(old.shape), old, reference, mask, coef=1.0, estimator=estimator.kl)
    return rewards, -negative.sum(-1).numpy()


def value_metrics(batch: Batch) -> Metrics:
    """Returns the fraction of the returns' variance that the critic explains, over trained tokens."""
    return explained(*(trained(batch, name) for name in ("values", "returns")))


def explained(values: Numbers, returns: Numbers) -> Metrics:
    """Returns the fraction of the returns' variance that the values explain; empty for fewer than two of them."""
    if min(len(values), len(returns)) < 2:
        return {}
    error, variance = (returns - values).var(ddof=1), returns.var(ddof=1)
    return {"critic/vf_explained_var": float(1 - error / (variance + 1e-5))}


def probability_metrics(batch: Batch) -> Metrics:
    """Compares the probabilities of trained tokens between engine and trainer."""
    rows = [np.asarray(e.rollout_log_prob, np.float64)[e.response_mask] for e in batch.experiences if not e.expert]
    engine, trainer = np.exp(np.concatenate([np.empty(0), *rows])), np.exp(trained(batch, "old_log_prob"))
    if len(engine) < 2:
        return {}
    away = np.abs(engine - trainer)
    where = "training/rollout_probs_diff"
    metrics = {f"{where}_valid": 1.0, f"{where}_max": float(away.max()), f"{where}_mean": float(away.mean())}
    metrics[f"{where}_std"] = float(away.std(ddof=1))
    if engine.std() and trainer.std():
        metrics["training/rollout_actor_probs_pearson_corr"] = float(np.corrcoef(engine, trainer)[0, 1])
    return metrics


def trained(batch: Batch, name: str) -> Numbers:
    """Returns a column's values at the trained tokens; empty if the column is missing."""
    rows = zip(batch.columns.get(name, ()), batch.experiences, strict=False)
    chosen = [np.asarray(values, np.float64)[e.response_mask] for values, e in rows if not e.expert]
    return np.concatenate(chosen) if chosen else np.empty(0)


def throughput(row: Mapping[str, float], prompts: float, responses: float, processes: int) -> Metrics:
    """Returns tokens per time from a row with `timing_s/` metrics."""
    total = prompts + responses
    if not responses:
        return {}
    tokens = {"gen": responses, **dict.fromkeys(_PER_TOKEN, total)}
    metrics = {
        f"timing_per_token_ms/{name}": row[f"timing_s/{name}"] * 1000 / number
        for name, number in tokens.items()
        if f"timing_s/{name}" in row
    }
    metrics["perf/total_num_tokens"] = total
    if row.get("timing_s/step"):
        metrics["perf/throughput"] = total / (row["timing_s/step"] * processes)
    return metrics


def balance_metrics(view: BatchView, ranks: int, mini_batches: int, prefix: str) -> Metrics:
    """Returns the tokens of the data ranks: for rows in their given order, and for balanced mini-batches."""
    lengths: list[int] = view.batch["attention_mask"].sum(-1).tolist()
    chunk = max(1, len(lengths) // ranks)
    dealt = [sum(lengths[start : start + chunk]) for start in range(0, len(lengths), chunk)]
    shared = [0] * ranks
    uids = list(dict.fromkeys(view.non_tensor_batch["uid"]))
    part_of = {uid: place * mini_batches // len(uids) for place, uid in enumerate(uids)}
    for part in range(mini_batches):
        rows = [n for n, uid in zip(lengths, view.non_tensor_batch["uid"], strict=True) if part_of[uid] == part]
        for rank, share in enumerate(partition([workload(length) for length in rows], ranks)):
            shared[rank] += sum(rows[row] for row in share)
    return {
        f"{prefix}/min": min(dealt),
        f"{prefix}/max": max(dealt),
        f"{prefix}/minmax_diff": max(dealt) - min(dealt),
        f"{prefix}/balanced_min": min(shared),
        f"{prefix}/balanced_max": max(shared),
        f"{prefix}/mean": sum(lengths) / ranks,
    }
