"""How model families write calls of tools into completions.

A format is a plugin: `trivium.testing.check_tool_format` tests one. The chat template of a model decides which it is
(`format_of`), unless the config names another (`model.tool_calls`).
"""

from trivium.text.tool_formats.base import MAX_DEPTH as MAX_DEPTH
from trivium.text.tool_formats.base import REASONING_TAIL as REASONING_TAIL
from trivium.text.tool_formats.base import Schemas as Schemas
from trivium.text.tool_formats.base import ToolCall as ToolCall
from trivium.text.tool_formats.base import ToolFormat as ToolFormat
from trivium.text.tool_formats.base import arguments_text as arguments_text
from trivium.text.tool_formats.base import without_partial as without_partial
from trivium.text.tool_formats.callable_tools import CallableTools as CallableTools
from trivium.text.tool_formats.detection import FORMATS as FORMATS
from trivium.text.tool_formats.detection import REFUSALS as REFUSALS
from trivium.text.tool_formats.detection import UnknownFormat as UnknownFormat
from trivium.text.tool_formats.detection import detected as detected
from trivium.text.tool_formats.detection import format_of as format_of
from trivium.text.tool_formats.detection import rendered_by as rendered_by
from trivium.text.tool_formats.json_calls import GPT_OSS as GPT_OSS
from trivium.text.tool_formats.json_calls import HERMES as HERMES
