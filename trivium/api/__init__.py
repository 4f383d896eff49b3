"""What plugins and scripts import: data types, interfaces, bases of config sections, and the parts that ship.

    from trivium.api import Message, Policy, Task

`docs/api.md` lists the names. A name is imported when it is used, so a module that takes `Message` does not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trivium.foundation.registry import lazy_module

if TYPE_CHECKING:
    from trivium.config import BufferConfig as BufferConfig
    from trivium.config import EngineConfig as EngineConfig
    from trivium.config import Plugin as Plugin
    from trivium.config import RewardConfig as RewardConfig
    from trivium.config import StrategyConfig as StrategyConfig
    from trivium.config import WorkflowConfig as WorkflowConfig
    from trivium.engines.torch.engine import TorchEngine as TorchEngine
    from trivium.foundation.errors import RolloutError as RolloutError
    from trivium.foundation.metrics import declare as declare
    from trivium.foundation.randomness import SampleKey as SampleKey
    from trivium.foundation.randomness import uniforms as uniforms
    from trivium.inspection.replay_step import replay as replay
    from trivium.inspection.report import write_report as write_report
    from trivium.inspection.rollout_view import decoder as decoder
    from trivium.inspection.rollout_view import json_of as json_of
    from trivium.inspection.rollouts import Rollout as Rollout
    from trivium.inspection.rollouts import TokenSequence as TokenSequence
    from trivium.inspection.rollouts import planned_steps as planned_steps
    from trivium.inspection.rollouts import read_rollouts as read_rollouts
    from trivium.loops import train_step as train_step
    from trivium.policy import EngineFailure as EngineFailure
    from trivium.policy import Policy as Policy
    from trivium.policy import Workflow as Workflow
    from trivium.processes.isolated import Isolated as Isolated
    from trivium.protocols import Buffer as Buffer
    from trivium.protocols import Environment as Environment
    from trivium.protocols import Monitor as Monitor
    from trivium.protocols import Operator as Operator
    from trivium.protocols import Reward as Reward
    from trivium.protocols import RolloutEngine as RolloutEngine
    from trivium.protocols import SampleStrategy as SampleStrategy
    from trivium.protocols import TaskSource as TaskSource
    from trivium.protocols import TrainEngine as TrainEngine
    from trivium.protocols import WeightChannel as WeightChannel
    from trivium.rewards.by_source import default_compute_score as default_compute_score
    from trivium.rewards.remote import RemoteReward as RemoteReward
    from trivium.rewards.remote_forms import RemoteSample as RemoteSample
    from trivium.rewards.remote_forms import RemoteScore as RemoteScore
    from trivium.rewards.sandbox import Sandbox as Sandbox
    from trivium.sync.memory import MemoryChannel as MemoryChannel
    from trivium.tasks.drawings import DrawnTasks as DrawnTasks
    from trivium.text.renderer import ChatRenderer as ChatRenderer
    from trivium.text.renderer import renderer_of as renderer_of
    from trivium.text.tiny import TinyModel as TinyModel
    from trivium.text.tiny_vision import TinyVisionModel as TinyVisionModel
    from trivium.text.tool_formats import ToolCall as ToolCall
    from trivium.text.tool_formats import ToolFormat as ToolFormat
    from trivium.text.tools import read_tool_calls as read_tool_calls
    from trivium.training.engine import TorchTrainEngine as TorchTrainEngine
    from trivium.types import Batch as Batch
    from trivium.types import Capabilities as Capabilities
    from trivium.types import Completion as Completion
    from trivium.types import Experience as Experience
    from trivium.types import Group as Group
    from trivium.types import Lease as Lease
    from trivium.types import Media as Media
    from trivium.types import Message as Message
    from trivium.types import Request as Request
    from trivium.types import Sample as Sample
    from trivium.types import Sampling as Sampling
    from trivium.types import StopReason as StopReason
    from trivium.types import Task as Task
    from trivium.types import Trajectory as Trajectory
    from trivium.types import Turn as Turn
    from trivium.workflows.verifiers import verifiers_rows as verifiers_rows

# It reads the names from the block above, which it parses: to offer a name, import it there.
__getattr__, __dir__ = lazy_module(__name__, __file__)
