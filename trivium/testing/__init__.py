"""Contract tests for plugin authors. The plugins of Trivium pass the same tests.

Call one from your own test. A broken promise raises an AssertionError that names it.
"""

from trivium.testing.channel_contract import check_channel
from trivium.testing.engine_contract import check_engine
from trivium.testing.engine_numbers import Tolerance
from trivium.testing.reference import ReferencePolicy, reference_policy
from trivium.testing.tool_format_contract import check_tool_format
from trivium.testing.train_engine_contract import check_train_engine
from trivium.testing.workflow_contract import check_workflow

__all__ = [
    "ReferencePolicy",
    "Tolerance",
    "check_channel",
    "check_engine",
    "check_tool_format",
    "check_train_engine",
    "check_workflow",
    "reference_policy",
]
