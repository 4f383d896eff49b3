"""The config: what a user sets (schema), how it is read and checked, and what follows from it (plan).

schema           the whole config, the base classes of plugin sections, and how `kind` picks a class
sections         the sections that are values alone, with their defaults and help
fields           marks of fields that a resumed run may change; paths
merging          merges config mappings
reading          YAML, `extends`, overrides, validation
rules            what a rule is that finds problems
checks           the rules for a config
resume           which fields a resumed run may change
plan             batch arithmetic, placement and memory of a config on a machine
memory_estimate  batch arithmetic and memory of a stage
model_shape      the size of a model, read from its config.json: parameters, bytes, FLOPs
model_memory     bytes of a model on a training rank and in an engine
"""

from trivium.config.fields import CHANGEABLE, ConfigPath, PluginPath, changeable, config_path, free, plugin_path
from trivium.config.merging import merged
from trivium.config.reading import (
    check,
    config_from_mapping,
    load_config,
    parse_override,
    read_yaml,
)
from trivium.config.schema import (
    AlgorithmConfig,
    BufferConfig,
    Config,
    CurriculumConfig,
    EngineConfig,
    ModelConfig,
    Plugin,
    RewardConfig,
    RunConfig,
    StrategyConfig,
    TrainConfig,
    WorkflowConfig,
    build,
    plugin,
)

__all__ = [
    "CHANGEABLE",
    "AlgorithmConfig",
    "BufferConfig",
    "Config",
    "ConfigPath",
    "CurriculumConfig",
    "EngineConfig",
    "ModelConfig",
    "Plugin",
    "PluginPath",
    "RewardConfig",
    "RunConfig",
    "StrategyConfig",
    "TrainConfig",
    "WorkflowConfig",
    "build",
    "changeable",
    "check",
    "config_from_mapping",
    "config_path",
    "free",
    "load_config",
    "merged",
    "parse_override",
    "plugin",
    "plugin_path",
    "read_yaml",
]
