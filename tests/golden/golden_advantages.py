"""Golden answers: advantage estimators, their post-processing, and the gates that came with them."""

from dataclasses import replace
from typing import Any

import torch
from golden_runners import Arguments, answers, policy_objective, section
from torch import Tensor

from trivium.algorithms import AdvantageInputs, Advantages
from trivium.algorithms.algorithm import Estimator
from trivium.algorithms.estimators.finishing import normalised
from trivium.algorithms.losses.base import policy_inputs
from trivium.algorithms.metadata import EstimatorMetadata, FilterMetadata, resolve_function
from trivium.algorithms.token_weights import discriminant
from trivium.types import Batch, Experience, Group, Task, Trajectory


def estimated(
    x: AdvantageInputs, kind: str, columns: Arguments, *, clip: float | None = None, **options: Any
) -> Advantages:
    """What a config with this estimator makes of the inputs."""
    function, metadata = resolve_function("advantages", section("advantages", kind, **options), EstimatorMetadata)
    there = {"rollout_is_weights"} & columns.keys()
    x = replace(x, columns={name: columns[name] for name in metadata.needs | there})
    return Estimator(function, metadata, clip=clip).advantages(x)[0]


# --------------------------------------------------------------------------- verl


_PLAIN = (
    "gae",
    "rloo",
    "opo",
    "gpg",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "optimal_token_baseline",
)
"""Functions of the peer whose names and options are ours."""


def _verl(inputs: Arguments, kind: str, **options: Any) -> Arguments:
    mask = inputs["response_mask"].bool()
    rows = torch.arange(len(mask))
    rewards = inputs.get("token_level_rewards", torch.zeros(mask.shape))
    x = AdvantageInputs(rewards, mask, inputs.get("index", rows), rows, components=_components(inputs))
    columns = {**inputs, "old_log_prob": inputs.get("old_log_probs"), "log_prob": inputs.get("old_log_probs")}
    if "reward_baselines" in inputs:
        columns["greedy_reward"] = inputs["reward_baselines"].unsqueeze(-1).expand(mask.shape)
    done = estimated(x, kind, columns, **options)
    return {"advantages": done.advantages, "returns": done.returns}


def _following(values: Tensor, mask: Tensor) -> Tensor:
    """The peer also writes the running return on tokens that are not trained on: what follows them."""
    result = values.clone()
    running = torch.zeros(len(values))
    for t in reversed(range(values.shape[1])):
        running = torch.where(mask[:, t], values[:, t], running)
        result[:, t] = running
    return result


def _components(inputs: Arguments) -> dict[str, Tensor]:
    values = inputs.get("component_rewards", torch.zeros(1, 0))
    return {str(number): column for number, column in enumerate(values.unbind(1))}


def _register(kind: str) -> None:
    @answers("advantages", kind)
    def run(inputs: Arguments, kwargs: Arguments) -> Arguments:
        return _verl(inputs, kind, **kwargs)


for _kind in _PLAIN:
    _register(_kind)


@answers("advantages", "tir_optimal_token_baseline")
def _tir(inputs: Arguments, kwargs: Arguments) -> Arguments:
    done = _verl(inputs, "tir_optimal_token_baseline", **kwargs)
    return done | {"returns": _following(done["returns"], inputs["response_mask"].bool())}


@answers("advantages", "grpo")
def _grpo(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return _verl(inputs, "grpo", norm_by_std=kwargs["norm_adv_by_std_in_grpo"])


@answers("advantages", "grpo_passk")
def _passk(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return _verl(inputs, "grpo_passk", norm_by_std=kwargs["norm_adv_by_std_in_grpo"])


@answers("advantages", "rloo_vectorized")
def _rloo_vectorized(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return _verl(inputs, "rloo", alone="zero")


@answers("advantages", "remax")
def _remax(inputs: Arguments, kwargs: Arguments) -> Arguments:
    done, mask = _verl(inputs, "remax"), inputs["response_mask"].bool()
    returns = _following(done["returns"], mask)
    return {"advantages": torch.where(mask, done["advantages"], returns), "returns": returns}


@answers("advantages", "gdpo")
def _gdpo(inputs: Arguments, kwargs: Arguments) -> Arguments:
    weights = {str(number): weight for number, weight in enumerate(kwargs["weights"])} if "weights" in kwargs else None
    return _verl(inputs, "gdpo", weights=weights, norm_by_std=kwargs.get("norm_adv_by_std_in_grpo", True))


# --------------------------------------------------------------------------- Trinity-RFT


def _last(values: Tensor, mask: Tensor) -> Tensor:
    """(B, L): each row's number on its last trained token."""
    last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
    return torch.where(last, values.unsqueeze(-1), torch.zeros(()))


def _trinity(inputs: Arguments, kind: str, **options: Any) -> Arguments:
    mask = inputs["action_mask"].bool()
    x = AdvantageInputs(_last(inputs["reward"], mask), mask, inputs["task"], torch.arange(len(mask)))
    columns = {"uniform": torch.zeros(mask.shape), "rollout_log_prob": inputs.get("logprobs")}
    return {
        "advantages": estimated(x, kind, columns, **options).advantages,
        "kept_rows": torch.arange(len(mask)),
    }


@answers("trinity", "adv_grpo", "adv_grpo_batch_std")
def _trinity_grpo(inputs: Arguments, kwargs: Arguments) -> Arguments:
    options = {"std_level": kwargs.get("std_cal_level", "group"), "epsilon": kwargs.get("epsilon", 1e-6)}
    return _trinity(inputs, "grpo", **options)


@answers("trinity", "adv_grpo_std_threshold")
def _std_threshold(inputs: Arguments, kwargs: Arguments) -> Arguments:
    done = _trinity(inputs, "grpo")
    keeps, _ = resolve_function(
        "filters", section("filters", "low_std", threshold=kwargs["std_threshold"]), FilterMetadata
    )
    rewards, tasks = inputs["reward"].tolist(), inputs["task"]
    kept = torch.tensor([keeps(_group([rewards[row] for row in torch.where(tasks == task)[0]])) for task in tasks])
    return {
        "advantages": torch.where(kept.unsqueeze(-1), done["advantages"], torch.nan),
        "kept_rows": torch.where(kept)[0],
    }


def _group(rewards: list[float]) -> Group:
    members = tuple(Trajectory(index, rewards={"r": reward}) for index, reward in enumerate(rewards))
    return Group(0, Task("t", ()), members)


@answers("trinity", "adv_grpo_rank_penalty")
def _rank_penalty(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return _trinity(inputs, "grpo_rank_penalty", **kwargs)


@answers("trinity", "adv_opmd")
def _opmd(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return _trinity(inputs, "opmd", baseline=kwargs["opmd_baseline"], tau=kwargs["tau"])


@answers("trinity", "adv_asymre")
def _asymre(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return _trinity(inputs, "asymre", **kwargs)


@answers("trinity", "adv_rec")
def _rec(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return _trinity(inputs, "rec", norm_by_std=kwargs["std_normalize"])


@answers("trinity", "adv_reinforce")
def _reinforce(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return _trinity(inputs, "reinforce")


def _episodes(inputs: Arguments, score: Tensor) -> tuple[AdvantageInputs, Arguments]:
    """Rows that are steps, as rows of one trajectory each; `score` (B,) is that of the row's episode."""
    mask = inputs["action_mask"].bool()
    x = AdvantageInputs(_last(score, mask), mask, inputs["task"], inputs["task"] * 1000 + inputs["run"])
    columns = {
        "turn": inputs["step"].unsqueeze(-1).where(mask, -1),
        "turn_reward": _last(inputs["reward"], mask),
        "turn_state": inputs.get("state", inputs["step"]).unsqueeze(-1).where(mask, -1),
    }
    return x, columns


def _of_episode(inputs: Arguments, score: str) -> Tensor:
    """(B,): the sum over each row's episode, or its last step's number."""
    same = (inputs["task"][:, None] == inputs["task"]) & (inputs["run"][:, None] == inputs["run"])
    if score == "sum":
        return torch.where(same, inputs["reward"], 0.0).sum(-1)
    return inputs["reward"][torch.where(same, inputs["step"], -1).argmax(-1)]


@answers("trinity", "adv_step_wise_grpo")
def _step_wise(inputs: Arguments, kwargs: Arguments) -> Arguments:
    x, columns = _episodes(inputs, _of_episode(inputs, "last"))
    options = {"norm_by_steps": kwargs["enable_step_norm"], "std_level": kwargs["std_cal_level"]}
    done = estimated(x, "step_wise_grpo", columns, **options)
    return {"advantages": done.advantages, "kept_rows": torch.arange(len(x.response_mask))}


@answers("trinity", "adv_gigpo")
def _gigpo(inputs: Arguments, kwargs: Arguments) -> Arguments:
    x, columns = _episodes(inputs, _of_episode(inputs, "sum"))
    done = estimated(x, "gigpo", columns, **kwargs)
    return {"advantages": done.advantages, "kept_rows": torch.arange(len(x.response_mask))}


def _distilled(inputs: Arguments, kwargs: Arguments, kind: str, metric: str) -> Arguments:
    mask = inputs["response_mask"].bool()
    rows = torch.arange(len(mask))
    columns = {"old_log_prob": inputs["old_log_probs"], "teacher_log_prob": inputs["teacher_logprobs"]}
    x = AdvantageInputs(torch.zeros(mask.shape), mask, rows, rows)
    advantages = estimated(x, kind, columns, **kwargs).advantages
    per_row = advantages.sum(-1)
    divergence = -per_row / kwargs["kl_coef"]
    metrics = {
        f"{metric}/mean": divergence.mean(),
        f"{metric}/std": divergence.std(),
        "advantages/mean": per_row.mean(),
    }
    return {"advantages": advantages, "response_mask": mask, "metrics": metrics}


@answers("trinity", "adv_on_policy_distill")
def _on_policy_distill(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return _distilled(inputs, kwargs, "on_policy_distill", "kl")


@answers("trinity", "adv_jsd")
def _jsd(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return _distilled(inputs, kwargs, "jsd", "jsd")


def _clipped(inputs: Arguments, log_prob: Tensor, gate: Arguments) -> tuple[Arguments, Tensor]:
    """(GRPO's advantages, the mask that a narrow gate leaves of a mini-batch, what was shut; the discriminants)."""
    mask, entropy = inputs["response_mask"].bool(), inputs["entropys"]
    done = _verl(inputs, "grpo")
    columns = {"advantages": done["advantages"], "log_prob": log_prob, "entropy": entropy}
    if "necs" in inputs:
        columns["mean_discriminant"] = inputs["necs"]
    left = _selected(mask, columns, gate)
    shares = {"": mask, "_pos": mask & (done["advantages"] > 0), "_neg": mask & (done["advantages"] < 0)}
    metrics = {
        f"frac_clipped{name}": (tokens & ~left).sum() / tokens.sum().clamp(min=1) for name, tokens in shares.items()
    }
    signal = discriminant(replace(policy_inputs(log_prob, mask), entropy=entropy))
    return {"advantages": done["advantages"], "response_mask": left, "metrics": metrics}, signal


def _selected(mask: Tensor, columns: Arguments, gate: Arguments) -> Tensor:
    """What a config's gate leaves to the policy loss, having seen the whole mini-batch."""
    objective = policy_objective("ppo", "token-mean", gates=({"narrow": True, **gate},))
    shifted = {name: torch.nn.functional.pad(column, (1, 0)) for name, column in columns.items()}
    padded = torch.nn.functional.pad(mask, (1, 0))
    batch = Batch(
        tuple(
            Experience(
                torch.zeros(padded.shape[1]).numpy(),
                row.numpy(),
                torch.zeros(padded.shape[1]).numpy(),
                torch.zeros(padded.shape[1]).numpy(),
                "group",
                i,
            )
            for i, row in enumerate(padded)
        )
    ).with_columns(**{name: [row.numpy() for row in column] for name, column in shifted.items()})
    chosen = objective.select(batch, 0)
    return torch.stack([torch.from_numpy(row.copy()) for row in chosen.columns["counted"]])[:, 1:].bool()


@answers("trinity", "adv_clip_b")
def _clip_b(inputs: Arguments, kwargs: Arguments) -> Arguments:
    result, signal = _clipped(inputs, inputs["rollout_log_probs"], {"kind": "clip_b", **kwargs})
    trained = signal[inputs["response_mask"].bool()]
    result["metrics"] |= {"ES": trained.mean(), "varS": trained.var(unbiased=False)}
    return result


@answers("trinity", "adv_clip_v")
def _clip_v(inputs: Arguments, kwargs: Arguments) -> Arguments:
    gate = {"kind": "clip_v", "mu": kwargs["mu"], "max_fraction": kwargs["max_frac"]}
    result, signal = _clipped(inputs, inputs["old_log_probs"], gate)
    trained = (signal - inputs["necs"])[inputs["response_mask"].bool()]
    result["metrics"] |= {"stdD": trained.std(unbiased=False)}
    return result


# --------------------------------------------------------------------------- LightRFT, OpenRLHF


_LIGHTRFT = {
    "gae": ("gae", {"whiten": False}),
    "reinforce": ("reinforce", {}),
    "rloo": ("reinforce_baseline", {"baseline": "others"}),
    "reinforce_baseline": ("reinforce_baseline", {}),
    "group_norm": ("group_norm", {}),
}
"""The peer's calculator -> the estimator and what a config says of it."""

_WHITENED = {
    "gae": ("gae", {"whiten": True}),
    "reinforce": ("reinforce_plus_plus", {}),
    "reinforce_baseline": ("reinforce_baseline", {"whiten": True}),
}
"""The same with the peer's `advantages_norm`, which divides by the unbiased standard deviation."""


@answers("lightrft", *(f"lightrft_adv_{name}" for name in _LIGHTRFT))
def _lightrft(inputs: Arguments, kwargs: Arguments) -> Arguments:
    mask, rewards = inputs["action_mask"].bool(), inputs["rewards"]
    rows = torch.arange(len(mask))
    scores = _last(rewards, mask)
    penalty = kwargs.get("kl_coef", 0.0) * torch.where(mask, inputs["kl"], 0.0)
    group = rows // kwargs.get("n_samples_per_prompt", 1)
    x = AdvantageInputs(scores - penalty, mask, group, rows, token_level_scores=scores)
    table = _WHITENED if kwargs.get("advantages_norm") else _LIGHTRFT
    kind, options = table[kwargs["estimator"]]
    if "gamma" in kwargs:
        options = {**options, "gamma": kwargs["gamma"]}
    if "lambd" in kwargs:
        options = {**options, "lam": kwargs["lambd"]}
    done = estimated(x, kind, inputs, clip=kwargs.get("advantage_clip"), **options)
    return {"shaped_rewards": _shaped(x, kwargs["estimator"]), "advantages": done.advantages, "returns": done.returns}


def _shaped(x: AdvantageInputs, calculator: str) -> Tensor:
    """What each row's reward was before anything was summed up: its undiscounted return without KL and critic."""
    kind, options = ("reinforce", {}) if calculator == "gae" else _LIGHTRFT[calculator]
    plain = estimated(x.unpenalised(), kind, {}, **options).returns
    return _last(torch.ones(len(plain)), x.response_mask).mul(plain).sum(-1)


@answers("lightrft", "lightrft_adv_cpgd")
def _cpgd(inputs: Arguments, kwargs: Arguments) -> Arguments:
    mask = inputs["action_mask"].bool()
    x = AdvantageInputs(inputs["token_rewards"], mask, torch.zeros(len(mask)).long(), torch.arange(len(mask)))
    done = estimated(x, "cpgd", {}, norm_by_std=kwargs["weight_factor"] == "STD_weight")
    return {"advantages": done.advantages, "returns": done.returns}


@answers("lightrft", "lightrft_cross_batch_norm")
def _cross_batch(inputs: Arguments, kwargs: Arguments) -> Arguments:
    advantages, mask = inputs["advantages"], inputs["action_mask"].bool()
    rows = torch.arange(len(mask))
    given = Estimator(
        lambda x: Advantages(x.token_level_rewards, x.token_level_rewards),
        EstimatorMetadata(formula="", source=""),
        normalise="mean" if kwargs["no_advantage_std_norm"] else "std",
    )
    return {"advantages": given.advantages(AdvantageInputs(advantages, mask, rows, rows))[0].advantages}


@answers("lightrft", "openrlhf_masked_normalize")
def _masked_normalize(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return {"out": normalised(inputs["tensor"], inputs["mask"].bool(), axis=kwargs["dim"])}
