"""Golden answers: policy losses."""

from golden_runners import Arguments, answers, minimised, policy_objective

from trivium.algorithms import compute_policy_loss


@answers("policy_loss", "compute_policy_loss")
def _compute_policy_loss(inputs: Arguments, kwargs: Arguments) -> Arguments:
    names = ("loss", "pg_clipfrac", "ppo_kl", "pg_clipfrac_lower")
    return dict(zip(names, compute_policy_loss(**inputs, **kwargs), strict=True))


_OPTIONS = {"clip_ratio_low": "clip_low", "clip_ratio_high": "clip_high", "clip_ratio_c": "dual_clip"}
"""The peer's word -> ours."""


def _verl(inputs: Arguments, kwargs: Arguments, kind: str) -> tuple[Arguments, dict[str, float]]:
    options = {_OPTIONS[name]: value for name, value in kwargs.items() if name in _OPTIONS}
    objective = policy_objective(kind, kwargs["loss_agg_mode"], weighted="rollout_is_weights" in inputs, **options)
    names = {"batch_num_tokens": "tokens", "global_batch_size": "sequences", "dp_size": "dp_size"}
    counts = {names[name]: value for name, value in kwargs.get("global_batch_info", {}).items() if name in names}
    columns = {name: tensor for name, tensor in inputs.items() if name not in ("log_prob", "response_mask")}
    loss, metrics = minimised(objective, inputs["log_prob"], inputs["response_mask"], columns, **counts)
    return {"loss": loss}, metrics


@answers("policy_loss", "vanilla")
def _vanilla(inputs: Arguments, kwargs: Arguments) -> Arguments:
    result, metrics = _verl(inputs, kwargs, "ppo")
    names = {
        "actor/pg_clipfrac": "train/clip_fraction",
        "actor/ppo_kl": "train/kl",
        "actor/pg_clipfrac_lower": "train/clip_fraction_lower",
    }
    return result | {"metrics": {theirs: metrics[ours] for theirs, ours in names.items()}}


@answers("policy_loss", "gpg")
def _gpg(inputs: Arguments, kwargs: Arguments) -> Arguments:
    result, _ = _verl(inputs, kwargs, "reinforce")  # the peer's loss of that name is REINFORCE's
    return result | {"metrics": {}}
