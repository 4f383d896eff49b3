"""verl's `core_algos`: its names and arguments of advantage estimators and losses, in two tables.

`ESTIMATORS` and `POLICY_LOSSES` give each name of verl the function of `trivium.algorithms` with the formula, and each
option there the argument of verl. The functions that verl's modules have (`compute_grpo_outcome_advantage`,
`compute_policy_loss_gspo`, ...) are made from the rows. Tensors are (B, R): B sequences, R tokens of the longest
response. Values outside `response_mask` are zero. `config` is any object or mapping with verl's keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any, TypeVar

from trivium.algorithms import AdaptiveKLController as AdaptiveKLController
from trivium.algorithms import FixedKLController as FixedKLController
from trivium.algorithms import PolicyObjective
from trivium.algorithms import agg_loss as agg_loss
from trivium.algorithms import compute_entropy_loss as compute_entropy_loss
from trivium.algorithms import compute_policy_loss as compute_policy_loss
from trivium.algorithms import compute_value_loss as compute_value_loss
from trivium.algorithms import get_kl_controller as get_kl_controller
from trivium.algorithms import kl_penalty as kl_penalty
from trivium.algorithms.batches import numbered
from trivium.algorithms.estimators.base import AdvantageInputs
from trivium.algorithms.losses.base import policy_inputs
from trivium.algorithms.metadata import PolicyLossMetadata, bind_options, metadata_of
from trivium.config import plugin
from trivium.foundation.errors import ConfigError
from trivium.foundation.registry import name_of, resolve, suggest
from trivium.frontdoors.plain_values import read
from trivium.models.heads.loss import LossDenominators, LossInputs
from trivium.models.late import torch

if TYPE_CHECKING:
    from torch import Tensor

Function = Callable[..., Any]
FunctionT = TypeVar("FunctionT", bound=Function)
_REWARDS, _MASK = "token_level_rewards", "response_mask"


class RegistryError(ConfigError, ValueError):
    """A name that is in use, or unknown. verl raises ValueError for them."""


# --------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class EstimatorOfVerl:
    """The estimator of `trivium.algorithms` that a name of verl stands for."""

    function: str
    """The name of the function in verl's module."""
    kind: str
    """The name of the estimator in `trivium.algorithms`."""
    required: Sequence[str] = (_REWARDS, _MASK, "index")
    """The required parameters in verl's order."""
    optional: Mapping[str, Any] = field(default_factory=lambda: {"epsilon": 1e-6, "config": None})
    """The other parameters in verl's order -> verl's default. Those that no other field names have no effect."""
    keywords: bool = True
    """Whether verl's function accepts further keywords. They have no effect."""
    columns: Mapping[str, str] = field(default_factory=dict[str, str])
    """Argument with a tensor -> the column of the inputs."""
    options: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    """Option -> the arguments, or keys of the argument `config`, with its value, the first one that is set."""
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options that the name determines."""
    __signature__: Signature = field(init=False, repr=False, compare=False)
    """The signature of verl's function."""

    def __post_init__(self) -> None:
        kind = Parameter.POSITIONAL_OR_KEYWORD
        parameters = [Parameter(name, kind) for name in self.required]
        parameters += [Parameter(name, kind, default=default) for name, default in self.optional.items()]
        if self.keywords:
            parameters.append(Parameter("kwargs", Parameter.VAR_KEYWORD))
        object.__setattr__(self, "__signature__", Signature(parameters))

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Returns (advantages, returns). `index` (B,) names the groups. Raises TypeError for a missing argument."""
        arguments = self.__signature__.bind(*args, **kwargs).arguments
        rewards, mask = arguments[_REWARDS], arguments[_MASK].bool()
        rows = torch.arange(len(rewards))
        index = arguments.get("index")
        group = rows if index is None else torch.from_numpy(numbered(_hashable(index)))
        columns = {
            column: tensor if tensor.dim() > 1 else tensor.unsqueeze(-1).expand(mask.shape)
            for name, column in self.columns.items()
            if (tensor := arguments.get(name)) is not None
        }
        options = {
            option: value
            for option, keys in self.options.items()
            if (value := first_value(arguments, keys)) is not None
        }
        inputs = AdvantageInputs(rewards, mask, group, rows, columns)
        advantages, returns = resolve("advantages", self.kind)(inputs, **options, **self.fixed)
        return advantages.detach(), returns.detach()


_BY_STD: dict[str, Any] = {
    "optional": {"epsilon": 1e-6, "norm_adv_by_std_in_grpo": True, "config": None},
    "keywords": False,
    "options": {"epsilon": ("epsilon",), "norm_by_std": ("norm_adv_by_std_in_grpo",)},
}
_TOKEN_BASELINE: dict[str, Any] = {
    "required": (_REWARDS, _MASK, "index", "old_log_probs", "sum_pi_squared"),
    "columns": {
        "old_log_probs": "log_prob",
        "sum_pi_squared": "sum_pi_squared",
        "rollout_is_weights": "rollout_is_weights",
    },
    "options": {"handle_zero_tail": ("handle_zero_tail",)},
}
ESTIMATORS: Mapping[str, EstimatorOfVerl] = {
    "gae": EstimatorOfVerl(
        "compute_gae_advantage_return",
        "gae",
        (_REWARDS, "values", _MASK, "gamma", "lam"),
        {},
        keywords=False,
        columns={"values": "values"},
        options={"gamma": ("gamma",), "lam": ("lam",)},
    ),
    "grpo": EstimatorOfVerl("compute_grpo_outcome_advantage", "grpo", **_BY_STD),
    "grpo_vectorized": EstimatorOfVerl("compute_grpo_vectorized_outcome_advantage", "grpo", **_BY_STD),
    "grpo_passk": EstimatorOfVerl(
        "compute_grpo_passk_outcome_advantage",
        "grpo_passk",
        optional=_BY_STD["optional"],
        options={
            "epsilon": ("epsilon",),
            "norm_by_std": ("config.norm_adv_by_std_in_grpo", "norm_adv_by_std_in_grpo"),
        },
    ),
    "reinforce_plus_plus": EstimatorOfVerl(
        "compute_reinforce_plus_plus_outcome_advantage",
        "reinforce_plus_plus",
        (_REWARDS, _MASK),
        {"config": None},
        options={"gamma": ("config.gamma",)},
    ),
    "reinforce_plus_plus_baseline": EstimatorOfVerl(
        "compute_reinforce_plus_plus_baseline_outcome_advantage", "reinforce_plus_plus_baseline"
    ),
    "remax": EstimatorOfVerl(
        "compute_remax_outcome_advantage",
        "remax",
        (_REWARDS, "reward_baselines", _MASK),
        {"config": None},
        columns={"reward_baselines": "greedy_reward"},
    ),
    "rloo": EstimatorOfVerl("compute_rloo_outcome_advantage", "rloo"),
    # verl's two functions differ for a group of one: its reward, and here 0.
    "rloo_vectorized": EstimatorOfVerl("compute_rloo_vectorized_outcome_advantage", "rloo", fixed={"alone": "zero"}),
    "opo": EstimatorOfVerl("compute_opo_outcome_advantage", "opo"),
    "gpg": EstimatorOfVerl(
        "compute_gpg_outcome_advantage",
        "gpg",
        optional={"epsilon": 1e-6, "f_norm": 1.0, "alpha": 1.0, "config": None},
        options={"f_norm": ("f_norm",)},
    ),
    "optimal_token_baseline": EstimatorOfVerl(
        "compute_optimal_token_baseline_advantage",
        "optimal_token_baseline",
        optional={"rollout_is_weights": None, "handle_zero_tail": False, "epsilon": 1e-8, "config": None},
        **_TOKEN_BASELINE,
    ),
    "tir_optimal_token_baseline": EstimatorOfVerl(
        "compute_multi_turn_optimal_token_baseline_advantage",
        "tir_optimal_token_baseline",
        optional={"rollout_is_weights": None, "handle_zero_tail": True, "epsilon": 1e-8, "config": None},
        **_TOKEN_BASELINE,
    ),
}
"""Each `adv_estimator` of verl whose function reads tensors alone. GDPO reads the components of the reward."""

AdvantageEstimator = StrEnum("AdvantageEstimator", {name.upper(): name for name in (*ESTIMATORS, "gdpo")})
"""The estimators of verl by name."""


@dataclass(frozen=True)
class PolicyLossOfVerl:
    """The loss of `trivium.algorithms` that a `loss_mode` of verl stands for."""

    kind: str
    """The name of the loss in `trivium.algorithms`."""
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Option -> the keys of the actor's config with its value, the first one that is set."""
    aggregate: str = ""
    """The aggregation, if `loss_agg_mode` does not determine it."""
    default: str = "token-mean"
    """The default of `loss_agg_mode`."""

    @property
    def clips_ratio(self) -> bool:
        """Whether `clip_low` bounds a ratio, which is above 0, so that bounds of 1 and more are equal."""
        return "clip_low" in self.options and self.kind != "gmpo"

    def __call__(
        self,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str | None = None,
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """Returns (loss, metrics of `trivium.algorithms`)."""
        function = resolve("policy_losses", self.kind)
        metadata = metadata_of(function, PolicyLossMetadata, self.kind)
        options = {name: first_value(config, keys) for name, keys in self.options.items()}
        options = {name: value for name, value in options.items() if value is not None}
        if self.clips_ratio and "clip_low" in options:
            # verl accepts larger bounds, which cut as 1 does.
            options["clip_low"] = min(1.0, options["clip_low"])
        section = plugin("policy_losses")({"kind": self.kind, **options})
        aggregate = self.aggregate or loss_agg_mode or self.default
        objective = PolicyObjective(bind_options(function, section), metadata, aggregate=aggregate)
        columns = {"advantages": advantages, "old_log_prob": old_log_prob, "rollout_log_prob": old_log_prob}
        if metadata.select is not None:  # verl's random choices come from torch's generator as well
            x = policy_inputs(log_prob.detach(), response_mask, **columns, uniform=torch.rand_like(log_prob.detach()))
            columns["selected"] = bind_options(metadata.select, section)(x).to(log_prob.dtype)
        if rollout_is_weights is not None:
            columns["rollout_is_weights"] = rollout_is_weights
        mask = response_mask.bool()
        inputs = LossInputs(mask, torch.zeros_like(log_prob), columns, log_prob)
        outputs = objective.loss(inputs, self._counts(mask, read(config, "global_batch_info", {})))
        tokens = max(int(mask.sum()), 1)
        return outputs.loss, {key: float(value) / tokens for key, value in outputs.sums.items()}

    def _counts(self, mask: Tensor, info: Mapping[str, Any]) -> LossDenominators:
        """Returns the denominators. `info` holds the counts of the whole step, as in `agg_loss`."""
        if self.kind == "gmpo":  # verl averages over all rows, whatever the global counts
            info = {"global_batch_size": len(mask)}
        return LossDenominators(
            int(info.get("batch_num_tokens") or mask.sum()),
            int(info.get("global_batch_size") or mask.any(-1).sum()),
            int(info.get("loss_scale_factor") or mask.shape[-1]),
            dp_size=int(info.get("dp_size") or 1),
        )


_CLIP = {"clip_low": ("clip_ratio_low", "clip_ratio"), "clip_high": ("clip_ratio_high", "clip_ratio")}
POLICY_LOSSES: Mapping[str, PolicyLossOfVerl] = {
    "vanilla": PolicyLossOfVerl("ppo", {**_CLIP, "dual_clip": ("clip_ratio_c",)}),
    "gspo": PolicyLossOfVerl("gspo", _CLIP, default="seq-mean-token-mean"),
    "sapo": PolicyLossOfVerl("sapo", {"tau_pos": ("tau_pos",), "tau_neg": ("tau_neg",)}, "seq-mean-token-mean"),
    "gpg": PolicyLossOfVerl("reinforce"),
    "clip_cov": PolicyLossOfVerl(
        "clip_cov",
        {
            **_CLIP,
            "ratio": ("policy_loss.clip_cov_ratio",),
            "cov_low": ("policy_loss.clip_cov_lb",),
            "cov_high": ("policy_loss.clip_cov_ub",),
        },
    ),
    "kl_cov": PolicyLossOfVerl(
        "kl_cov", {"ratio": ("policy_loss.kl_cov_ratio",), "coef": ("policy_loss.ppo_kl_coef",)}
    ),
    "geo_mean": PolicyLossOfVerl("gmpo", _CLIP, "seq-mean-token-mean"),
    "cispo": PolicyLossOfVerl("cispo", _CLIP),
    "dppo_tv": PolicyLossOfVerl(
        "dppo_tv", {"tv_low": _CLIP["clip_low"], "tv_high": _CLIP["clip_high"], "max_ratio": ("clip_ratio_c",)}
    ),
    "dppo_kl": PolicyLossOfVerl(
        "dppo_kl", {"kl_low": _CLIP["clip_low"], "kl_high": _CLIP["clip_high"], "max_ratio": ("clip_ratio_c",)}
    ),
    "dro": PolicyLossOfVerl("dro", {"beta": ("policy_loss.dro_beta", "dro_beta")}),
}
"""Each `loss_mode` of verl."""
LOSSES: Mapping[str, PolicyLossOfVerl] = {loss.kind: loss for loss in POLICY_LOSSES.values()}
"""The same by the names of `trivium.algorithms`."""
_FUNCTIONS: Mapping[str, Function] = {
    **{estimator.function: estimator for estimator in ESTIMATORS.values()},
    **{f"compute_policy_loss_{mode}": loss for mode, loss in POLICY_LOSSES.items()},
}
for _name, _function in _FUNCTIONS.items():  # a script may register a function of verl under another name
    object.__setattr__(_function, "__qualname__", _name)


def __getattr__(name: str) -> Function:
    """Returns the function of a row by its name in verl's module."""
    if name not in _FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _FUNCTIONS[name]


def kind_of(mode: str) -> str:
    """Returns the name of a `loss_mode` in `trivium.algorithms`; another name stays as it is."""
    return POLICY_LOSSES[mode].kind if mode in POLICY_LOSSES else mode


def first_value(config: Any, keys: Sequence[str]) -> Any:
    """Returns the first of these dotted keys that has a value."""
    for key in keys:
        value = config
        for part in key.split("."):
            value = None if value is None else read(value, part)
        if value is not None:
            return value
    return None


def _hashable(index: Any) -> list[Any]:
    return index.tolist() if hasattr(index, "tolist") else list(index)


# --------------------------------------------------------------------------- functions of users

ADV_ESTIMATOR_REGISTRY: dict[str, Function] = {}
"""Name -> the estimator of a user, which `register_adv_est` adds."""
POLICY_LOSS_REGISTRY: dict[str, Function] = {}
"""Name -> the policy loss of a user, which `register_policy_loss` adds."""


def register_adv_est(name_or_enum: str | Enum) -> Callable[[FunctionT], FunctionT]:
    """Registers a function as a value of `algorithm.adv_estimator`. Raises RegistryError for a name in use."""
    shipped = dict.fromkeys(AdvantageEstimator)
    return lambda function: _registered(ADV_ESTIMATOR_REGISTRY, shipped, name_or_enum, function)


def register_policy_loss(name: str | Enum) -> Callable[[FunctionT], FunctionT]:
    """Registers a function as a value of `actor.policy_loss.loss_mode`. Raises RegistryError for a name in use."""
    return lambda function: _registered(POLICY_LOSS_REGISTRY, POLICY_LOSSES, name, function)


def get_adv_estimator_fn(name_or_enum: str | Enum) -> Function:
    """Returns the estimator of a name. Raises RegistryError for an unknown name."""
    return _lookup({**ESTIMATORS, **ADV_ESTIMATOR_REGISTRY}, "advantage estimator", "register_adv_est", name_or_enum)


def get_policy_loss_fn(name: str | Enum) -> Function:
    """Returns the policy loss of a name. Raises RegistryError for an unknown name."""
    return _lookup({**POLICY_LOSSES, **POLICY_LOSS_REGISTRY}, "policy loss", "register_policy_loss", name)


def _registered(
    functions: dict[str, Function], shipped: Mapping[str, Any], name: str | Enum, function: FunctionT
) -> FunctionT:
    key = _key(name)
    registered = functions.get(key)
    # The module of a function may be loaded twice: by the script, and by the address in a config.
    if key in shipped or (registered is not None and _identity(registered) != _identity(function)):
        holder = f"the estimator or loss {key!r}" if registered is None else name_of(registered)
        raise RegistryError(f"register {key!r}", f"the name stands for {holder}", "choose another name")
    functions[key] = function
    return function


def _identity(function: Function) -> tuple[str, object]:
    """Returns the address of a function. An object without a name is only itself."""
    return function.__module__, getattr(function, "__qualname__", function)


def _lookup(functions: Mapping[str, Function], what: str, decorator: str, name: str | Enum) -> Function:
    key = _key(name)
    if key not in functions:
        raise RegistryError(
            f"the {what} {key!r}",
            "no function is registered under this name",
            f"{suggest(key, functions)}; or import the module that uses @{decorator}({key!r}) first",
        )
    return functions[key]


def _key(name: str | Enum) -> str:
    return str(name.value) if isinstance(name, Enum) else name
