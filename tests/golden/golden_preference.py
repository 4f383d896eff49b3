"""Golden answers: losses over preferences, and over a reward model's scores."""

import torch
from algebra import section
from golden_runners import Arguments, answers
from preferences import interleaved, on_rows, preference, scoring
from torch import Tensor
from torch.nn.functional import pad

from trivium.algorithms import PairInputs
from trivium.algorithms.metadata import PairLossMetadata, resolve_function
from trivium.algorithms.preference.losses import reference_point

SIDES = ("policy_chosen", "policy_rejected", "reference_chosen", "reference_rejected")


def _sides(inputs: Arguments) -> list[Tensor]:
    return [inputs[f"{side}_logps"] for side in SIDES]


def _on_pairs(inputs: Arguments, kind: str, **options: float) -> Arguments:
    """What a mini-batch of replies of one token each comes to."""
    policy_chosen, policy_rejected, reference_chosen, reference_rejected = _sides(inputs)
    log_prob, reference = interleaved(policy_chosen, policy_rejected), interleaved(reference_chosen, reference_rejected)
    objective = preference(kind, **options)
    loss, _ = on_rows(objective, log_prob, torch.ones_like(log_prob), reference)
    there = torch.ones_like(policy_chosen).bool()
    done = objective.pair_loss(PairInputs(*_sides(inputs), there, there))
    return {"loss": loss, "chosen_rewards": done.chosen_rewards, "rejected_rewards": done.rejected_rewards}


@answers("lightrft", "dpo_loss")
def _dpo(inputs: Arguments, kwargs: Arguments) -> Arguments:
    if kwargs["ipo"]:
        return _on_pairs(inputs, "ipo", beta=kwargs["beta"])
    return _on_pairs(inputs, "dpo", beta=kwargs["beta"], label_smoothing=kwargs["label_smoothing"])


@answers("lightrft", "vanilla_kto_loss")
def _kto_pair(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return _on_pairs(inputs, "kto_pair", **kwargs)


@answers("lightrft", "kto_loss")
def _kto(inputs: Arguments, kwargs: Arguments) -> Arguments:
    """Replies that are not in pairs: the shorter side is filled up with replies that are not there."""
    sides, kl = _sides(inputs), reference_point(inputs["policy_KL_logps"] - inputs["reference_KL_logps"])
    counts = [len(side) for side in sides[:2]]
    filled = [pad(side, (0, max(counts) - len(side))) for side in sides]
    there = [torch.arange(max(counts)) < number for number in counts]
    loss, _ = resolve_function("pair_losses", section("pair_losses", "kto", **kwargs), PairLossMetadata)
    done = loss(PairInputs(*filled, *there, kl))
    rewards = {
        "chosen_rewards": done.chosen_rewards[: counts[0]],
        "rejected_rewards": done.rejected_rewards[: counts[1]],
    }
    return {"loss": done.loss.sum() / sum(counts), "kl": kl, **rewards}


def _of_scores(inputs: Arguments, kind: str, **options: float) -> Arguments:
    scores = interleaved(inputs["chosen_reward"], inputs["reject_reward"])
    return {"loss": on_rows(scoring(kind, **options), scores, torch.ones_like(scores))[0]}


@answers("lightrft", "rm_sigmoid")
def _sigmoid(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return _of_scores(inputs, "sigmoid", margin=kwargs["margin"] or 0.0)


@answers("lightrft", "rm_logexp")
def _logexp(inputs: Arguments, kwargs: Arguments) -> Arguments:
    assert kwargs["margin"] is None
    return _of_scores(inputs, "logexp")


@answers("lightrft", "rm_hps")
def _hps(inputs: Arguments, kwargs: Arguments) -> Arguments:
    assert not kwargs
    return _of_scores(inputs, "hps")


@answers("trinity", "dpo")
def _trinity_dpo(inputs: Arguments, kwargs: Arguments) -> Arguments:
    loss, metrics = on_rows(
        preference("dpo", **kwargs), inputs["logprob"], inputs["action_mask"], inputs["ref_logprob"]
    )
    names = {
        "chosen_reward": "train/preference_chosen",
        "rejected_reward": "train/preference_rejected",
        "accuracy_mean": "train/preference_accuracy",
    }
    return {"loss": loss, "metrics": {**{theirs: metrics[ours] for theirs, ours in names.items()}, "dpo_loss": loss}}
