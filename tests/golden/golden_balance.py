"""Answers to the family `balance`: balanced partitions, and what k of n samples are worth."""

from golden_runners import Arguments, answers

from trivium.evaluate import best_at_k, maj_at_k, pass_at_k, worst_at_k
from trivium.training.balance import partition, workload


@answers("balance", "karmarkar_karp")
def _partition(inputs: Arguments, kwargs: Arguments) -> Arguments:
    lengths = inputs["lengths"].tolist()
    parts = partition(lengths, kwargs["k_partitions"], equal_size=kwargs["equal_size"])
    sums = [sum(lengths[item] for item in part) for part in parts]
    return {"partitions": parts, "sums": sums, "spread": max(sums) - min(sums)}


@answers("balance", "workload")
def _workload(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return {"workload": [workload(length) for length in inputs["lengths"].tolist()]}


@answers("balance", "pass_at_k")
def _pass_at_k(inputs: Arguments, kwargs: Arguments) -> Arguments:
    correct = inputs["correct"]
    return {"pass_at_k": {str(k): pass_at_k(len(correct), int(correct.sum()), k) for k in kwargs["k"]}}


@answers("balance", "best_worst_at_k")
def _best_worst_at_k(inputs: Arguments, kwargs: Arguments) -> Arguments:
    rewards = inputs["rewards"].tolist()
    return {
        "best_at_k": {str(k): best_at_k(rewards, k) for k in kwargs["k"]},
        "worst_at_k": {str(k): worst_at_k(rewards, k) for k in kwargs["k"]},
        "mean": best_at_k(rewards, 1),
    }


@answers("balance", "maj_at_k")
def _maj_at_k(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return {"maj_at_k": {str(k): maj_at_k(inputs["answers"], inputs["correct_answer"], k) for k in kwargs["k"]}}
