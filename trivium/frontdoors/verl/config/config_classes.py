"""verl's config dataclasses, as views of the config table: its keys are the fields, with its defaults and its checks.

A key that the table has no default for is None: the trainer then follows another key, or a default of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import FrozenInstanceError, dataclass, field, fields, is_dataclass, make_dataclass
from importlib import import_module
from typing import Any, cast

from trivium.errors import ConfigError, Problem
from trivium.frontdoors.plain_values import Section, plain
from trivium.frontdoors.tables import Moved
from trivium.frontdoors.verl.config.config_table import TABLE
from trivium.registry import CATALOGUE, suggest


class InvalidConfig(ConfigError, ValueError):
    """Values that do not fit a config class. verl raises ValueError for them."""


@dataclass
class BaseConfig(Mapping[str, Any]):
    """A config section, read by attribute, as a mapping, or with `get`. A field is set once, except sizes of batches
    and what a trainer adds."""

    def __post_init__(self) -> None:
        """Checks the values. Raises InvalidConfig with all problems."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self) and "batch_size" not in name and name not in _MUTABLE:
            raise FrozenInstanceError(f"{type(self).__name__}.{name} is set already: create another config")
        super().__setattr__(name, value)

    def get(self, key: str, default: Any = None) -> Any:
        return getattr(self, key, default)

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return (each.name for each in fields(self))

    def __len__(self) -> int:
        return len(fields(self))


_MUTABLE = ("engine", "model_config", "clip_grad", "total_training_steps", "lr_warmup_steps", "global_batch_info")
"""Fields that verl's trainer sets later."""


class _Table(BaseConfig):
    """A config class whose fields are the keys of a section of the table."""

    _prefix = ""
    """The section."""

    def __post_init__(self) -> None:
        for name, kind in _NESTED.get(self._prefix, {}).items():
            value = vars(self)[name]
            if isinstance(value, Mapping) and not isinstance(value, BaseConfig):
                vars(self)[name] = _instance(kind, value)
        values = {name: value for name, value in plain(self).items() if name != "global_batch_info"}
        _refuse(self, [*TABLE.read(_under(self._prefix, values)).problems, *self._own_problems()])

    def _own_problems(self) -> Iterator[Problem]:
        """Yields what verl checks when it creates the config."""
        mode, name = self.get("loss_agg_mode"), f"{self._prefix}.loss_agg_mode"
        if mode is not None and mode not in CATALOGUE["aggregations"]:
            yield Problem(name, repr(mode), "Invalid loss_agg_mode", suggest(mode, CATALOGUE["aggregations"]))
        size, per_gpu = self.get("ppo_micro_batch_size"), self.get("ppo_micro_batch_size_per_gpu")
        if size is not None and per_gpu is not None and not self.get("use_dynamic_bsz"):
            found = f"You have set both: ppo_micro_batch_size_per_gpu is {per_gpu}"
            yield Problem(f"{self._prefix}.ppo_micro_batch_size", str(size), found, "set the size per GPU alone")

    def validate(self, n_gpus: int, train_batch_size: int, model_config: Mapping[str, Any] | None = None) -> None:
        """Raises InvalidConfig for sizes of batches that do not fit `train_batch_size` or `n_gpus`, and for Ulysses
        without `use_remove_padding`."""
        _refuse(self, self._size_problems(n_gpus, train_batch_size, model_config))

    def _size_problems(self, gpus: int, batch_size: int, model: Mapping[str, Any] | None) -> Iterator[Problem]:
        mini, micro = self.get("ppo_mini_batch_size"), self.get("ppo_micro_batch_size")
        ranks, where = self.get("ulysses_sequence_parallel_size") or 1, f"{self._prefix}.ppo_micro_batch_size"
        if not self.get("use_dynamic_bsz"):
            if mini is not None and batch_size < mini:
                found = f"data.train_batch_size is {batch_size}"
                yield Problem(f"{self._prefix}.ppo_mini_batch_size", str(mini), found, "choose a divisor of it")
            if micro is not None and mini is not None and mini % micro:
                yield Problem(where, str(micro), f"ppo_mini_batch_size is {mini}", "choose a divisor of it")
            if micro is not None and micro * ranks < gpus:
                found = f"times the {ranks} sequence rank(s), it must be >= n_gpus ({gpus})"
                yield Problem(where, str(micro), found, "raise it")
        if ranks > 1 and model and not model.get("use_remove_padding"):
            where = f"{self._prefix}.ulysses_sequence_parallel_size"
            yield Problem(where, str(ranks), "the model keeps padding", "you must enable `use_remove_padding`")


def _refuse(config: BaseConfig, problems: Any) -> None:
    if listed := list(problems):
        raise InvalidConfig(
            f"{type(config).__name__} with values that the trainer takes",
            f"{len(listed)} problem(s)",
            "fix them all:",
            listed,
        )


def _under(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values as a config, in their section."""
    for part in reversed(prefix.split(".")):
        values = {part: values}
    return dict(values)


def _class(name: str, prefix: str, **defaults: Any) -> Any:
    """Creates a config class of a section. `defaults` override those of the table, by value or by class."""
    names: dict[str, Any] = {}
    for key, entry in TABLE.entries.items():
        if key.startswith(f"{prefix}.") and not isinstance(entry, Moved):
            own = key.removeprefix(f"{prefix}.").partition(".")[0]
            names.setdefault(own, TABLE.default_of(key) if key == f"{prefix}.{own}" else None)
    given = [(each, Any, _default(value)) for each, value in {**names, **defaults}.items()]
    made = make_dataclass(name, given, bases=(_Table,), namespace={"_prefix": prefix})
    made.__module__, made.__doc__ = __name__, f"The section `{prefix}` of verl's config."
    return made


def _default(value: Any) -> Any:
    return field(default_factory=value) if isinstance(value, type) else value


_ACTOR = "actor_rollout_ref.actor"
KLControlConfig = _class("KLControlConfig", "algorithm.kl_ctrl")
PFPPOConfig = _class("PFPPOConfig", "algorithm.pf_ppo")
FilterGroupsConfig = _class("FilterGroupsConfig", "algorithm.filter_groups")
RolloutCorrectionConfig = _class("RolloutCorrectionConfig", "algorithm.rollout_correction")
AlgoConfig = _class("AlgoConfig", "algorithm", kl_ctrl=KLControlConfig)
PolicyLossConfig = _class("PolicyLossConfig", f"{_ACTOR}.policy_loss")
OptimizerConfig = _class("OptimizerConfig", f"{_ACTOR}.optim")
ActorConfig = _class(
    "ActorConfig",
    _ACTOR,
    strategy="fsdp",
    policy_loss=PolicyLossConfig,
    optim=OptimizerConfig,
    fsdp_config=Section,
    global_batch_info=Section,
)
CriticConfig = _class("CriticConfig", "critic", strategy="fsdp", optim=Section, model=Section)


class FSDPActorConfig(ActorConfig):
    """The section `actor_rollout_ref.actor` of verl's config."""


class FSDPCriticConfig(CriticConfig):
    """The section `critic` of verl's config."""


_NESTED: Mapping[str, Mapping[str, Any]] = {
    "algorithm": {
        "kl_ctrl": KLControlConfig,
        "pf_ppo": PFPPOConfig,
        "filter_groups": FilterGroupsConfig,
        "rollout_correction": RolloutCorrectionConfig,
    },
    _ACTOR: {"policy_loss": PolicyLossConfig, "optim": OptimizerConfig, "fsdp_config": Section.of},
    "critic": {"optim": Section.of, "model": Section.of},
}
"""Section -> its fields that are sections themselves -> the class of their values."""


def omega_conf_to_dataclass(config: Any, dataclass_type: type | None = None) -> Any:
    """Creates a config object from a mapping or an OmegaConf container: of `dataclass_type`, else of the class that the
    key `_target_` names. An object is returned as it is, and an empty config gives a `dataclass_type` of defaults.

    Raises InvalidConfig for a type that is no dataclass, for a config without either, and for invalid values.
    """
    values = plain(config)
    if not values:
        return None if dataclass_type is None else dataclass_type()
    if not isinstance(values, dict) or is_dataclass(config):
        return config
    target = values.get("_target_")
    if dataclass_type is None and not target:
        raise InvalidConfig("a config object", f"no `_target_` among {', '.join(values)}", "pass dataclass_type")
    kind: type[Any] = dataclass_type or _target(str(target))
    if not is_dataclass(kind):
        raise InvalidConfig("a dataclass as the type of a config", repr(kind), "decorate it with @dataclass")
    return _instance(cast(type[Any], kind), values)


def _target(address: str) -> Any:
    """Returns the class at `module.name`. Those of verl are the classes of this module."""
    module, _, name = address.rpartition(".")
    if module.partition(".")[0] != "verl":
        return getattr(import_module(module), name)
    if not is_dataclass(globals().get(name)):
        found = "there is no such class here"
        raise InvalidConfig(f"the config class {address}", found, "use the classes without Megatron, or a mapping")
    return globals()[name]


def _instance(kind: Any, values: Mapping[str, Any]) -> Any:
    """Returns an object of a config class; mappings with a `_target_` inside become objects of theirs."""
    arguments = {name: _part(value) for name, value in values.items() if name != "_target_"}
    names = getattr(kind, "__dataclass_fields__", None)
    if names is None:
        return kind(arguments)
    if unknown := arguments.keys() - names.keys():
        found = "it has no such field"
        raise InvalidConfig(f"{kind.__name__}.{min(unknown)}", found, suggest(min(unknown), list(names)))
    return kind(**arguments)


def _part(value: Any) -> Any:
    """Returns the object of a mapping that names its class, a section for a class of verl that is not here (those of
    profilers and optimizers of other backends, for example), and any other value as it is."""
    if not isinstance(value, Mapping) or "_target_" not in value:
        return value
    values = cast(Mapping[str, Any], value)
    address = str(values["_target_"])
    is_absent = address.startswith("verl.") and address.rpartition(".")[2] not in globals()
    return _instance(Section.of if is_absent else _target(address), values)
