"""The data types that the roles exchange: frozen values over read-only numpy arrays.

trajectories  tasks, requests, completions, turns, trajectories, groups: the explorers' data
batches       experiences and batches: the trainer's data
capabilities  the abilities that a plugin declares
enums         statuses, sync methods and styles, stop reasons
arrays        array types
"""

from trivium.types.arrays import (
    AnyArray,
    BoolArray,
    Columns,
    FloatArray,
    IntArray,
    Metrics,
)
from trivium.types.batches import (
    AT_UPDATE,
    CANDIDATES,
    REFERENCE_REWARDS,
    SCORES,
    SOURCE,
    Batch,
    Experience,
    Teacher,
    TurnSpan,
    experiences_of,
    reference_rewards,
)
from trivium.types.capabilities import (
    Capabilities,
    capabilities_of,
)
from trivium.types.enums import (
    TRAINER,
    RunningStatus,
    SaveStrategy,
    StopReason,
    SyncMethod,
    SyncStyle,
)
from trivium.types.sequences import Fork, forks_of, sequences_of
from trivium.types.trajectories import (
    EXPERT_VERSION,
    EXTRAS,
    IMAGE,
    MIN_TEMPERATURE,
    SERVED,
    Completion,
    Draws,
    Failure,
    Group,
    Lease,
    Media,
    Message,
    Prompt,
    Request,
    Sample,
    Sampling,
    Task,
    Trajectory,
    Turn,
    with_system,
)

__all__ = [
    "AT_UPDATE",
    "CANDIDATES",
    "EXPERT_VERSION",
    "EXTRAS",
    "IMAGE",
    "MIN_TEMPERATURE",
    "REFERENCE_REWARDS",
    "SCORES",
    "SERVED",
    "SOURCE",
    "TRAINER",
    "AnyArray",
    "Batch",
    "BoolArray",
    "Capabilities",
    "Columns",
    "Completion",
    "Draws",
    "Experience",
    "Failure",
    "FloatArray",
    "Fork",
    "Group",
    "IntArray",
    "Lease",
    "Media",
    "Message",
    "Metrics",
    "Prompt",
    "Request",
    "RunningStatus",
    "Sample",
    "Sampling",
    "SaveStrategy",
    "StopReason",
    "SyncMethod",
    "SyncStyle",
    "Task",
    "Teacher",
    "Trajectory",
    "Turn",
    "TurnSpan",
    "capabilities_of",
    "experiences_of",
    "forks_of",
    "reference_rewards",
    "sequences_of",
    "with_system",
]
