"""verl's metric utilities: metrics of a batch under verl's names. RayPPOTrainer logs the same names (`dashboard`).

Legend: B sequences, P the longest prompt, R the longest response.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trivium.errors import DataError
from trivium.frontdoors.verl.objects.dashboard import Numbers, explained, spread, throughput
from trivium.frontdoors.verl.objects.validation import averages
from trivium.types import Metrics

_REDUCTIONS = {"max": np.max, "min": np.min}


def reduce_metrics(metrics: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Returns the mean of each list; the maximum or minimum if `max` or `min` is a word of the metric's name, such as
    `loss/max` or `min_reward`. An empty list gives NaN."""
    return {name: float(_reduction(name)(values)) if len(values) else np.nan for name, values in metrics.items()}


def _reduction(name: str) -> Any:
    words = re.split(r"[^a-z]+", name.lower())
    return next((reduce for word, reduce in _REDUCTIONS.items() if word in words), np.mean)


def compute_data_metrics(batch: Any, use_critic: bool = True) -> Metrics:
    """Returns mean, max and min of scores, rewards, advantages, returns, values, lengths and turns of a DataProto.

    It has `token_level_scores`, `token_level_rewards`, `advantages`, `returns`, `response_mask` (B, R), `responses`
    (B, R), `attention_mask` (B, P + R) and, with `use_critic`, `values` (B, R). Scores and rewards leave out empty
    responses. Raises DataError if every response is empty.
    """
    tensors = batch.batch
    prompts, responses = _lengths(batch)
    if not responses.any():
        raise DataError("metrics of a batch", "every response is empty", "leave such batches out")
    mask = tensors["response_mask"].bool()
    limit_p, limit_r = tensors["attention_mask"].shape[-1] - mask.shape[-1], mask.shape[-1]
    trained = {
        name: tensors[name][mask].double().numpy()
        for name in ("advantages", "returns", *(["values"] if use_critic else []))
    }
    given = {
        f"critic/{name}": tensors[key].sum(-1).double().numpy()[responses > 0]
        for name, key in (("score", "token_level_scores"), ("rewards", "token_level_rewards"))
    }
    given |= {f"critic/{name}": values for name, values in trained.items()}
    given |= {"response_length": responses, "response_length_non_aborted": responses[responses > 0]}
    given |= {"prompt_length": prompts}
    for name, where in (("__num_turns__", "num_turns"), ("tool_call_counts", "tool_call_counts")):
        if name in batch.non_tensor_batch:
            given[where] = np.asarray(batch.non_tensor_batch[name], np.float64)
    metrics = {name: number for where, values in given.items() for name, number in spread(where, values).items()}
    if use_critic:
        metrics |= explained(trained["values"], trained["returns"])
    return metrics | {
        "response_length/clip_ratio": float((responses == limit_r).mean()),
        "response_length_non_aborted/clip_ratio": float((responses[responses > 0] == limit_r).mean()),
        "prompt_length/clip_ratio": float((prompts == limit_p).mean()),
        "response/aborted_ratio": float((responses == 0).mean()),
    }


def compute_timing_metrics(batch: Any, timing_raw: Mapping[str, float]) -> Metrics:
    """Returns `timing_s/<phase>` of each phase in seconds, and `timing_per_token_ms/<phase>`: of `gen` per token of the
    responses, of the others per token of prompts and responses."""
    row = {f"timing_s/{name}": seconds for name, seconds in timing_raw.items()}
    prompts, responses = (float(lengths.sum()) for lengths in _lengths(batch))
    rates = throughput(row, prompts, responses, 1)
    return row | {name: rate for name, rate in rates.items() if name.startswith("timing_per_token_ms/")}


def compute_throughout_metrics(batch: Any, timing_raw: Mapping[str, float], n_gpus: int) -> Metrics:
    """Returns tokens (the sum of `meta_info["global_token_num"]`), seconds of the phase `step`, and tokens per second
    and GPU."""
    tokens, seconds = sum(batch.meta_info["global_token_num"]), timing_raw["step"]
    return {
        "perf/total_num_tokens": tokens,
        "perf/time_per_step": seconds,
        "perf/throughput": tokens / (seconds * n_gpus),
    }


def process_validation_metrics(
    data_sources: Sequence[str], sample_uids: Sequence[str], infos_dict: Mapping[str, Sequence[Any]], seed: int = 42
) -> dict[str, dict[str, dict[str, float]]]:
    """Returns {data source: {variable: {statistic: value}}}: the statistics of `validation.of_task` over the samples
    with one uid, averaged over uids. Predictions, the variable `pred`, give `maj@n`.

    `best@n`, `worst@n` and `maj@n` are exact over all choices of n samples, where verl draws samples with `seed`.
    """
    del seed
    tables: dict[tuple[str, str], dict[str, list[Any]]] = {}
    for row, key in enumerate(zip(data_sources, sample_uids, strict=True)):
        table = tables.setdefault(key, {name: [] for name in infos_dict})
        for name, values in infos_dict.items():
            table[name].append(values[row])
    result: dict[str, dict[str, dict[str, float]]] = {}
    for (source, name, statistic), value in averages([(key[0], table) for key, table in tables.items()]).items():
        result.setdefault(source, {}).setdefault(name, {})[statistic] = value
    return result


def bootstrap_metric(
    data: Sequence[Any],
    subset_size: int,
    reduce_fns: Sequence[Callable[[list[Any]], float]],
    n_bootstrap: int = 1000,
    seed: int = 42,
) -> list[tuple[float, float]]:
    """Returns (mean, standard deviation) of each function over `n_bootstrap` draws of `subset_size` items, with
    replacement. Metrics of validation are exact instead (`validation.of_task`)."""
    chosen = np.random.default_rng(seed).integers(len(data), size=(n_bootstrap, subset_size))
    draws = [[data[place] for place in places] for places in chosen]
    values = [np.array([function(draw) for draw in draws], np.float64) for function in reduce_fns]
    return [(float(each.mean()), float(each.std())) for each in values]


def calc_maj_val(data: Sequence[Mapping[str, Any]], vote_key: str, val_key: str) -> Any:
    """Returns the value of the first item with the most frequent vote; of equally frequent votes, the first."""
    votes = Counter(item[vote_key] for item in data)
    winner = max(votes, key=lambda vote: votes[vote])
    return next(item[val_key] for item in data if item[vote_key] == winner)


def _lengths(batch: Any) -> tuple[Numbers, Numbers]:
    """Returns the numbers of tokens of prompts and responses (B,)."""
    limit, attention = batch.batch["responses"].shape[-1], batch.batch["attention_mask"]
    cut = attention.shape[-1] - limit
    return attention[:, :cut].sum(-1).double().numpy(), attention[:, cut:].sum(-1).double().numpy()
