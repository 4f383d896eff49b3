"""The interfaces of all components, as structural types: a user's class needs no base class of Trivium.

rollout         tasks, renderer, engine, environment, reward
storage         buffer, sample strategy, operators of the experience pipeline
learning        objectives, the algorithm, the train engine, monitors
weight_channel  transfer of weights from the trainer to the explorers

Only `TrainEngine` is a base class: some of its methods are derived from the others.
"""

from trivium.protocols.learning import (
    Algorithm,
    CutAnywhere,
    EngineSettings,
    FileMonitor,
    MeasuringEngine,
    MeteredEngine,
    Monitor,
    Objective,
    PacedObjective,
    RecordingEngine,
    SteppedEngine,
    StepSettings,
    TrainEngine,
    TrainerProtocol,
)
from trivium.protocols.rollout import (
    ClosedEnvironment,
    Environment,
    FinishedEnvironment,
    Progress,
    ReadableEngine,
    Renderer,
    RestingEngine,
    Reward,
    RolloutEngine,
    StreamingEngine,
    TaskSource,
)
from trivium.protocols.storage import Buffer, Operator, SampleStrategy
from trivium.protocols.weight_channel import (
    DescribedWeights,
    TensorSpec,
    WeightChannel,
    WeightHandle,
    WeightOffer,
    Weights,
    offer_on,
)

__all__ = [
    "Algorithm",
    "Buffer",
    "ClosedEnvironment",
    "CutAnywhere",
    "DescribedWeights",
    "EngineSettings",
    "Environment",
    "FileMonitor",
    "FinishedEnvironment",
    "MeasuringEngine",
    "MeteredEngine",
    "Monitor",
    "Objective",
    "Operator",
    "PacedObjective",
    "Progress",
    "ReadableEngine",
    "RecordingEngine",
    "Renderer",
    "RestingEngine",
    "Reward",
    "RolloutEngine",
    "SampleStrategy",
    "StepSettings",
    "SteppedEngine",
    "StreamingEngine",
    "TaskSource",
    "TensorSpec",
    "TrainEngine",
    "TrainerProtocol",
    "WeightChannel",
    "WeightHandle",
    "WeightOffer",
    "Weights",
    "offer_on",
]
