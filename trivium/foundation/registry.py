"""The catalogue of plugins: kind -> short name -> import path. It lists the plugins that ship with Trivium; users give
import paths.

A name is a short name (`grpo`), a path (`my.package:Thing`) or a file (`rewards.py:mine`, relative to the config).
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from trivium.foundation.errors import ConfigError, UnknownName

CATALOGUE: dict[str, dict[str, str]] = {
    "models": {
        "hf": "trivium.models.backbone.huggingface:HuggingFaceModel",
        "tiny": "trivium.text.tiny:TinyModel",
        "tiny_vision": "trivium.text.tiny_vision:TinyVisionModel",
    },
    "tasks": {
        "jsonl": "trivium.tasks.files:JsonlTasks",
        "parquet": "trivium.tasks.files:ParquetTasks",
        "datasets": "trivium.tasks.hf:DatasetsTasks",
        "reasoning_gym": "trivium.tasks.generators:ReasoningGymTasks",
        "python": "trivium.tasks.generators:PythonTasks",
        "given": "trivium.tasks.given:GivenRows",
        "arithmetic": "trivium.tasks.generators:ArithmeticTasks",
        "drawings": "trivium.tasks.drawings:DrawnTasks",
        "served": "trivium.tasks.served:ServedTasks",
        "sources": "trivium.tasks.concatenation:Sources",
    },
    "curricula": {
        "difficulty": "trivium.tasks.curricula:Difficulty",
        "success_rate": "trivium.tasks.curricula:SuccessRate",
    },
    "workflows": {
        "single_turn": "trivium.workflows.single_turn:SingleTurn",
        "multi_turn": "trivium.workflows.multi_turn:MultiTurn",
        "tools": "trivium.workflows.function_tools:FunctionTools",
        "gymnasium": "trivium.workflows.gymnasium:Gymnasium",
        "mcp": "trivium.workflows.mcp:Mcp",
        "openenv": "trivium.workflows.openenv:OpenEnv",
        "verifiers": "trivium.workflows.verifiers:Verifiers",
    },
    "environments": {},
    "tools": {},
    "functions": {},
    "rewards": {
        "exact": "trivium.rewards.functions:Exact",
        "regex": "trivium.rewards.functions:Regex",
        "format": "trivium.rewards.functions:Format",
        "gsm8k": "trivium.rewards.functions:Gsm8k",
        "math_verify": "trivium.rewards.functions:MathVerify",
        "reasoning_gym": "trivium.rewards.functions:ReasoningGym",
        "by_source": "trivium.rewards.by_source:BySource",
        "model": "trivium.rewards.model:ModelReward",
        "remote": "trivium.rewards.remote:RemoteReward",
        "generative_judge": "trivium.rewards.generative:GenerativeJudge",
        "recipe": "trivium.rewards.recipe:Recipe",
    },
    "renderers": {
        "chat": "trivium.text.renderer:renderer_of",
    },
    "tool_calls": {
        "hermes": "trivium.text.tool_formats.json_calls:HERMES",
        "llama3": "trivium.text.tool_formats.json_calls:LLAMA3",
        "mistral": "trivium.text.tool_formats.json_calls:MISTRAL",
        "deepseek": "trivium.text.tool_formats.json_calls:DEEPSEEK",
        "gpt_oss": "trivium.text.tool_formats.json_calls:GPT_OSS",
        "cohere": "trivium.text.tool_formats.json_calls:COHERE",
        "xml": "trivium.text.tool_formats.tagged_calls:XML",
        "glm": "trivium.text.tool_formats.tagged_calls:GLM",
        "minimax": "trivium.text.tool_formats.tagged_calls:MINIMAX",
        "muse": "trivium.text.tool_formats.tagged_calls:MUSE",
        "lfm": "trivium.text.tool_formats.literal_calls:LFM",
        "gemma": "trivium.text.tool_formats.literal_calls:GEMMA",
    },
    "engines": {
        "torch": "trivium.engines.torch.engine:TorchEngine",
        "scripted": "trivium.engines.scripted:ScriptedEngine",
        "endpoint": "trivium.engines.endpoint.engine:EndpointEngine",
        "vllm": "trivium.engines.vllm.engine:VllmEngine",
    },
    "algorithms": {
        "grpo": "trivium.algorithms.presets:GRPO",
        "ppo": "trivium.algorithms.presets:PPO",
        "rloo": "trivium.algorithms.presets:RLOO",
        "remax": "trivium.algorithms.presets:REMAX",
        "opo": "trivium.algorithms.presets:OPO",
        "reinforce_plus_plus": "trivium.algorithms.presets:REINFORCE_PLUS_PLUS",
        "reinforce_plus_plus_baseline": "trivium.algorithms.presets:REINFORCE_PLUS_PLUS_BASELINE",
        "max_rl": "trivium.algorithms.presets:MAX_RL",
        "gdpo": "trivium.algorithms.presets:GDPO",
        "gigpo": "trivium.algorithms.presets:GIGPO",
        "step_wise_grpo": "trivium.algorithms.presets:STEP_WISE_GRPO",
        "dr_grpo": "trivium.algorithms.presets:DR_GRPO",
        "dapo": "trivium.algorithms.presets:DAPO",
        "gspo": "trivium.algorithms.presets:GSPO",
        "luspo": "trivium.algorithms.presets:LUSPO",
        "sapo": "trivium.algorithms.presets:SAPO",
        "gmpo": "trivium.algorithms.presets:GMPO",
        "cispo": "trivium.algorithms.presets:CISPO",
        "clip_cov": "trivium.algorithms.presets:CLIP_COV",
        "kl_cov": "trivium.algorithms.presets:KL_COV",
        "dppo": "trivium.algorithms.presets:DPPO",
        "m2po": "trivium.algorithms.presets:M2PO",
        "vespo": "trivium.algorithms.presets:VESPO",
        "cpgd": "trivium.algorithms.presets:CPGD",
        "prime": "trivium.algorithms.presets:PRIME",
        "echo": "trivium.algorithms.presets:ECHO",
        "fipo": "trivium.algorithms.presets:FIPO",
        "real": "trivium.algorithms.presets:REAL",
        "scale_rl": "trivium.algorithms.presets:SCALE_RL",
        "a_star_po": "trivium.algorithms.presets:A_STAR_PO",
        "iw_opd": "trivium.algorithms.presets:IW_OPD",
        "sdpo": "trivium.algorithms.presets:SDPO",
        "decoupled_ppo": "trivium.algorithms.presets:DECOUPLED_PPO",
        "reinforce": "trivium.algorithms.presets:REINFORCE",
        "gpg": "trivium.algorithms.presets:GPG",
        "opmd": "trivium.algorithms.presets:OPMD",
        "asymre": "trivium.algorithms.presets:ASYMRE",
        "topr": "trivium.algorithms.presets:TOPR",
        "sppo": "trivium.algorithms.presets:SPPO",
        "raft": "trivium.algorithms.presets:RAFT",
        "rec": "trivium.algorithms.presets:REC",
        "sft": "trivium.algorithms.presets:SFT",
        "dpo": "trivium.algorithms.presets:DPO",
        "ipo": "trivium.algorithms.presets:IPO",
        "kto": "trivium.algorithms.presets:KTO",
        "reward_model": "trivium.algorithms.presets:REWARD_MODEL",
        "distill": "trivium.algorithms.presets:DISTILL",
        "distill_top_k": "trivium.algorithms.presets:DISTILL_TOP_K",
        "distill_student_top_k": "trivium.algorithms.presets:DISTILL_STUDENT_TOP_K",
        "opsd": "trivium.algorithms.presets:OPSD",
        "sdft": "trivium.algorithms.presets:SDFT",
    },
    "advantages": {
        "a_star_po": "trivium.algorithms.losses.regression:a_star_po",
        "accept": "trivium.algorithms.estimators.baselines:accept",
        "asymre": "trivium.algorithms.estimators.baselines:asymre",
        "cpgd": "trivium.algorithms.estimators.group:cpgd",
        "gae": "trivium.algorithms.estimators.returns:gae",
        "gdpo": "trivium.algorithms.estimators.components:gdpo",
        "gigpo": "trivium.algorithms.estimators.steps:gigpo",
        "gpg": "trivium.algorithms.estimators.group:gpg",
        "group_norm": "trivium.algorithms.estimators.returns:group_norm",
        "grpo": "trivium.algorithms.estimators.group:grpo",
        "grpo_passk": "trivium.algorithms.estimators.group:grpo_passk",
        "grpo_rank_penalty": "trivium.algorithms.estimators.group:grpo_rank_penalty",
        "jsd": "trivium.algorithms.estimators.on_policy_distill:jsd",
        "max_rl": "trivium.algorithms.estimators.group:max_rl",
        "on_policy_distill": "trivium.algorithms.estimators.on_policy_distill:on_policy_distill",
        "opmd": "trivium.algorithms.estimators.baselines:opmd",
        "opo": "trivium.algorithms.estimators.group:opo",
        "optimal_token_baseline": "trivium.algorithms.estimators.tokens:optimal_token_baseline",
        "rec": "trivium.algorithms.estimators.baselines:rec",
        "reinforce": "trivium.algorithms.estimators.returns:reinforce",
        "reinforce_baseline": "trivium.algorithms.estimators.returns:reinforce_baseline",
        "reinforce_plus_plus": "trivium.algorithms.estimators.returns:reinforce_plus_plus",
        "reinforce_plus_plus_baseline": "trivium.algorithms.estimators.group:reinforce_plus_plus_baseline",
        "remax": "trivium.algorithms.estimators.returns:remax",
        "rloo": "trivium.algorithms.estimators.group:rloo",
        "step_wise_grpo": "trivium.algorithms.estimators.steps:step_wise_grpo",
        "tir_optimal_token_baseline": "trivium.algorithms.estimators.tokens:tir_optimal_token_baseline",
    },
    "policy_losses": {
        "ppo": "trivium.algorithms.losses.clipped:ppo",
        "reinforce": "trivium.algorithms.losses.weighted:reinforce",
        "importance_sampling": "trivium.algorithms.losses.weighted:importance_sampling",
        "cispo": "trivium.algorithms.losses.weighted:cispo",
        "sapo": "trivium.algorithms.losses.clipped:sapo",
        "cpgd": "trivium.algorithms.losses.clipped:cpgd",
        "gspo": "trivium.algorithms.losses.sequence:gspo",
        "gspo_sequence": "trivium.algorithms.losses.sequence:gspo_sequence",
        "gmpo": "trivium.algorithms.losses.sequence:gmpo",
        "clip_cov": "trivium.algorithms.losses.covariance:clip_cov",
        "kl_cov": "trivium.algorithms.losses.covariance:kl_cov",
        "dppo_tv": "trivium.algorithms.losses.trust:dppo_tv",
        "dppo_kl": "trivium.algorithms.losses.trust:dppo_kl",
        "prime": "trivium.algorithms.losses.trust:prime",
        "dro": "trivium.algorithms.losses.trust:dro",
        "m2po": "trivium.algorithms.losses.trust:m2po",
        "opmd": "trivium.algorithms.losses.off_policy:opmd",
        "topr": "trivium.algorithms.losses.off_policy:topr",
        "vespo": "trivium.algorithms.losses.off_policy:vespo",
        "sppo": "trivium.algorithms.losses.off_policy:sppo",
        "rec": "trivium.algorithms.losses.rec:rec",
        "rec_regularized": "trivium.algorithms.losses.rec:rec_regularized",
        "red_weight": "trivium.algorithms.losses.rec:red_weight",
        "mix": "trivium.algorithms.losses.mixed:mix",
        "mix_chord": "trivium.algorithms.losses.mixed:mix_chord",
        "sft": "trivium.algorithms.losses.supervised:sft",
        "sft_is": "trivium.algorithms.losses.supervised:sft_is",
        "sft_phi": "trivium.algorithms.losses.supervised:sft_phi",
        "distill": "trivium.algorithms.losses.distillation:distill",
        "distill_top_k": "trivium.algorithms.losses.distillation:distill_top_k",
        "distill_student_top_k": "trivium.algorithms.losses.distillation:distill_student_top_k",
        "fipo": "trivium.algorithms.losses.future:fipo",
        "real": "trivium.algorithms.losses.labels:real",
        "a_star_po": "trivium.algorithms.losses.regression:a_star_po_loss",
    },
    "gates": {
        "clip_b": "trivium.algorithms.token_weights:clip_b",
        "clip_v": "trivium.algorithms.token_weights:clip_v",
        "sequence_drift": "trivium.algorithms.token_weights:sequence_drift",
        "probability_difference": "trivium.algorithms.token_weights:probability_difference",
        "top_entropy": "trivium.algorithms.token_weights:top_entropy",
        "prompt_mean": "trivium.algorithms.token_weights:prompt_mean",
    },
    "kl_estimators": {
        "kl": "trivium.algorithms.kl:k1",
        "k1": "trivium.algorithms.kl:k1",
        "abs": "trivium.algorithms.kl:absolute",
        "mse": "trivium.algorithms.kl:k2",
        "k2": "trivium.algorithms.kl:k2",
        "low_var_kl": "trivium.algorithms.kl:k3",
        "k3": "trivium.algorithms.kl:k3",
        "corrected_k3": "trivium.algorithms.kl:corrected_k3",
        "kl+": "trivium.algorithms.kl:k1_plus",
        "k1+": "trivium.algorithms.kl:k1_plus",
        "abs+": "trivium.algorithms.kl:absolute_plus",
        "mse+": "trivium.algorithms.kl:k2_plus",
        "k2+": "trivium.algorithms.kl:k2_plus",
        "low_var_kl+": "trivium.algorithms.kl:k3_plus",
        "k3+": "trivium.algorithms.kl:k3_plus",
    },
    "entropies": {
        "exact": "trivium.algorithms.entropy:exact",
        "sampled": "trivium.algorithms.entropy:sampled",
    },
    "aggregations": {
        "token-mean": "trivium.algorithms.aggregation:token_mean",
        "token-sum": "trivium.algorithms.aggregation:token_sum",
        "seq-mean-token-sum": "trivium.algorithms.aggregation:seq_mean_token_sum",
        "seq-mean-token-mean": "trivium.algorithms.aggregation:seq_mean_token_mean",
        "seq-mean-token-sum-norm": "trivium.algorithms.aggregation:seq_mean_token_sum_norm",
    },
    "pair_losses": {
        "dpo": "trivium.algorithms.preference.losses:dpo",
        "ipo": "trivium.algorithms.preference.losses:ipo",
        "kto": "trivium.algorithms.preference.losses:kto",
        "kto_mismatched": "trivium.algorithms.preference.losses:kto_mismatched",
        "kto_pair": "trivium.algorithms.preference.losses:kto_pair",
    },
    "score_losses": {
        "sigmoid": "trivium.algorithms.preference.losses:sigmoid",
        "logexp": "trivium.algorithms.preference.losses:logexp",
        "hps": "trivium.algorithms.preference.losses:hps",
    },
    "corrections": {
        "auto": "trivium.algorithms.correction:AUTO",
        "none": "trivium.algorithms.correction:NONE",
        "custom": "trivium.algorithms.correction:CUSTOM",
        "decoupled_token_is": "trivium.algorithms.correction:DECOUPLED_TOKEN_IS",
        "decoupled_seq_is": "trivium.algorithms.correction:DECOUPLED_SEQ_IS",
        "decoupled_seq_is_rs": "trivium.algorithms.correction:DECOUPLED_SEQ_IS_RS",
        "decoupled_geo_rs": "trivium.algorithms.correction:DECOUPLED_GEO_RS",
        "decoupled_geo_rs_seq_tis": "trivium.algorithms.correction:DECOUPLED_GEO_RS_SEQ_TIS",
        "decoupled_geo_rs_token_tis": "trivium.algorithms.correction:DECOUPLED_GEO_RS_TOKEN_TIS",
        "decoupled_k3_rs": "trivium.algorithms.correction:DECOUPLED_K3_RS",
        "decoupled_k3_rs_seq_tis": "trivium.algorithms.correction:DECOUPLED_K3_RS_SEQ_TIS",
        "decoupled_k3_rs_token_tis": "trivium.algorithms.correction:DECOUPLED_K3_RS_TOKEN_TIS",
        "bypass_token_is": "trivium.algorithms.correction:BYPASS_TOKEN_IS",
        "bypass_seq_is": "trivium.algorithms.correction:BYPASS_SEQ_IS",
        "bypass_geo_rs": "trivium.algorithms.correction:BYPASS_GEO_RS",
        "bypass_geo_rs_seq_tis": "trivium.algorithms.correction:BYPASS_GEO_RS_SEQ_TIS",
        "bypass_geo_rs_token_tis": "trivium.algorithms.correction:BYPASS_GEO_RS_TOKEN_TIS",
        "bypass_k3_rs": "trivium.algorithms.correction:BYPASS_K3_RS",
    },
    "filters": {
        "zero_variance": "trivium.algorithms.filters:zero_variance",
        "low_std": "trivium.algorithms.filters:low_std",
        "difficulty": "trivium.algorithms.filters:difficulty",
        "overlong": "trivium.algorithms.filters:overlong",
        "reference_solved": "trivium.algorithms.filters:reference_solved",
    },
    "shapings": {
        "overlong_penalty": "trivium.algorithms.shaping:overlong_penalty",
        "truncation_penalty": "trivium.algorithms.shaping:truncation_penalty",
        "length_penalty": "trivium.algorithms.shaping:length_penalty",
        "relative_length": "trivium.algorithms.shaping:relative_length",
        "clip": "trivium.algorithms.shaping:clip",
        "scale_shift": "trivium.algorithms.shaping:scale_shift",
        "group_normalise": "trivium.algorithms.shaping:group_normalise",
        "running_normalise": "trivium.algorithms.shaping:running_normalise",
        "role_baseline": "trivium.algorithms.shaping:role_baseline",
    },
    "train": {
        "torch": "trivium.training.engine:TorchTrainEngine",
    },
    "buffers": {
        "memory": "trivium.buffers.memory:MemoryBuffer",
        "files": "trivium.buffers.files:FileBuffer",
        "sql": "trivium.buffers.sql.buffer:SqlBuffer",
    },
    "sample_strategies": {
        "default": "trivium.buffers.strategies:DefaultStrategy",
        "staleness_control": "trivium.buffers.strategies:StalenessControl",
        "replay": "trivium.buffers.replay:Replay",
        "mix": "trivium.buffers.strategies:Mix",
    },
    "operators": {
        "reward_filter": "trivium.buffers.operators:RewardFilter",
        "reward_std_filter": "trivium.buffers.operators:RewardStdFilter",
        "reward_shaping": "trivium.buffers.operators:RewardShaping",
        "dedup": "trivium.buffers.operators:Dedup",
        "metrics": "trivium.buffers.operators:GroupMetrics",
    },
    "channels": {
        "memory": "trivium.sync.memory:MemoryChannel",
        "checkpoint": "trivium.sync.files:FileChannel",
        "nccl": "trivium.sync.collective:CollectiveChannel",
    },
    "monitors": {
        "console": "trivium.monitors.console:ConsoleMonitor",
        "jsonl": "trivium.monitors.jsonl:JsonlMonitor",
        "tensorboard": "trivium.monitors.tensorboard:TensorBoardMonitor",
        "wandb": "trivium.monitors.wandb:WandbMonitor",
        "mlflow": "trivium.monitors.mlflow:MlflowMonitor",
    },
    "sessions": {
        "ray": "trivium.cluster.session:ray_session",
    },
}


_DESCRIBED = {
    "trivium.engines.torch.engine:TorchEngine": "trivium.engines.torch.section:DescribedTorchEngine",
    "trivium.engines.vllm.engine:VllmEngine": "trivium.engines.vllm.section:DescribedVllmEngine",
    "trivium.training.engine:TorchTrainEngine": "trivium.training.section:DescribedTorchTrainEngine",
}
"""The plugins whose modules import torch, and the base class of each with its section and capabilities."""


def add_names(kind: str, names: Mapping[str, str]) -> None:
    """Adds short names of a kind to the catalogue. Front doors call it for their own plugins."""
    CATALOGUE.setdefault(kind, {}).update(names)


def suggest(name: str, valid_names: Iterable[str]) -> str:
    """A text with the closest valid name, if any, and all valid names."""
    names = sorted(valid_names)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return (f"did you mean {close[0]!r}? " if close else "") + f"known: {', '.join(names)}"


_GIVEN: dict[str, object] = {}
"""Objects from Python callers that cannot be imported by name: lambdas, inner functions, instances."""


def name_of(thing: Callable[..., object]) -> str:
    """Returns the name by which `resolve` finds a function, a class or a callable object of a Python caller. If the
    name cannot be imported, it is valid only in this process (see `is_unnamed`)."""
    kind = type(thing)
    qualname: str = getattr(thing, "__qualname__", f"{kind.__qualname__}()")
    module: str = getattr(thing, "__module__", kind.__module__)
    if getattr(sys.modules.get(module), qualname, None) is not thing:
        _GIVEN[f"{module}:{qualname}"] = thing
    else:
        _GIVEN.pop(f"{module}:{qualname}", None)
    return f"{module}:{qualname}"


def give(name: str, thing: object) -> None:
    """Makes `resolve` return the object for a name that `name_of` returned in another process."""
    _GIVEN[name] = thing


def is_unnamed(name: str) -> bool:
    """Whether the name cannot be imported, since a Python caller passed the object."""
    return name.endswith(("()", ">")) or "<locals>" in name


def is_only_here(name: str) -> bool:
    """Whether the name is valid only in this process. Other processes have another `__main__`."""
    return is_unnamed(name) or name.startswith("__main__:")


def resolve(kind: str, name: str, base: Path | None = None) -> Any:
    """The object that a name of a kind (`engines`, `rewards`, ...) stands for.

    Raises UnknownName for a name that is not in the catalogue, ConfigError for a path that cannot be imported or lacks
    the attribute. An import error inside a user's own file passes through with its cause.
    """
    if name in _GIVEN:
        return _GIVEN[name]
    path = CATALOGUE[kind].get(name, name)
    module_name, separator, attribute = path.rpartition(":")
    if not separator:
        raise UnknownName(f"{kind}: {name!r}", "no such name", suggest(name, CATALOGUE[kind]))
    module = _load_file(module_name, base) if module_name.endswith(".py") else _load_module(module_name, path)
    if is_only_here(path) and not hasattr(module, attribute):
        raise ConfigError(
            f"{kind}: {path!r}",
            "a Python script or notebook passed this object to trivium.run, and this process does not have it",
            "run the script again, or move the object to a module and name it there",
        )
    if not hasattr(module, attribute):
        raise UnknownName(
            f"{kind}: {path!r}",
            f"{module_name} has no {attribute!r}",
            suggest(attribute, _offered(module)),
        )
    return getattr(module, attribute)


def describe(kind: str, name: str) -> Any:
    """What `resolve` returns, or a base class of it with the same `Config` and `capabilities` in a module that imports
    no torch: enough to read a config and to check it."""
    return resolve(kind, name if name in _GIVEN else _DESCRIBED.get(CATALOGUE[kind].get(name, name), name))


@cache
def lazy_names(file: str) -> dict[str, str]:
    """The names that the module in `file` imports under `if TYPE_CHECKING`, and the module of each.

    Type checkers read that block, and `lazy_module` does, so that there is one list.
    """
    statements = ast.parse(Path(file).read_text(encoding="utf-8")).body
    block = next(node for node in statements if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def lazy_module(name: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a module that imports its `lazy_names` on first use."""

    def imported(attribute: str) -> Any:
        home = lazy_names(file).get(attribute)
        if home is None:
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        return getattr(importlib.import_module(home), attribute)

    def listed() -> list[str]:
        return sorted([*vars(sys.modules[name]), *lazy_names(file)])

    return imported, listed


def _offered(module: ModuleType) -> list[str]:
    """Public names that the module defines, without its imports."""
    public = {name: thing for name, thing in vars(module).items() if not name.startswith("_")}
    return [
        name
        for name, thing in public.items()
        if not hasattr(thing, "__name__") or getattr(thing, "__module__", None) == module.__name__
    ]


def _load_module(module_name: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise  # the module exists, but one of its imports failed
        raise ConfigError(
            f"import {path!r}",
            f"there is no module {error.name!r}",
            "check the spelling, or add its folder to PYTHONPATH",
        ) from error


def _load_file(file_name: str, base: Path | None) -> ModuleType:
    """A module from a file, loaded once per path under a name derived from that path."""
    path = ((base or Path.cwd()) / file_name).resolve()
    module_name = f"trivium_user_{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"load {file_name!r}", f"no file at {path}", "give a path relative to the config file")
    module = importlib.util.module_from_spec(spec)
    # Before the file runs: a dataclass with annotations as text looks up its module there.
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module
