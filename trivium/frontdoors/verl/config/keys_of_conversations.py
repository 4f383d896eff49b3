"""The keys of tools, interactions and agent loops in verl's config, and the workflow that they become."""

from __future__ import annotations

from pathlib import Path

from trivium.frontdoors.tables import Entry, Ignored, Mapped, Moved, Restricted, if_on, ignored

_ARGS = "workflow.environment_args"
_TURNS = {"conversation": True}
"""The condition of rows about rollouts of several turns."""
_SERVER = "use an engine by path in a RunConfig: engine.kind"

FORMATS = ("hermes", "qwen", "qwen25", "llama3_json", "chatml")
"""Values of `multi_turn.format` whose notation of tool calls is read."""

CONVERSATIONS: dict[str, Entry] = {
    "multi_turn.enable": Mapped("whether workflow.kind is multi_turn", False),
    "multi_turn.tool_config_path": Mapped(f"{_ARGS}.tools", type=Path, convert=if_on, when=_TURNS),
    "multi_turn.function_tool_path": Mapped(f"{_ARGS}.functions", type=Path, convert=if_on, when=_TURNS),
    "multi_turn.interaction_config_path": Mapped(f"{_ARGS}.interactions", type=Path, convert=if_on, when=_TURNS),
    "multi_turn.max_assistant_turns": Mapped(
        ("workflow.max_turns", f"{_ARGS}.max_assistant_turns"), type=int, when=_TURNS
    ),
    "multi_turn.max_turns": Moved("actor_rollout_ref.rollout.multi_turn.max_assistant_turns"),
    "multi_turn.max_user_turns": Mapped(f"{_ARGS}.max_user_turns", type=int, when=_TURNS),
    "multi_turn.max_parallel_calls": Mapped(f"{_ARGS}.max_parallel_calls", 1, when=_TURNS),
    "multi_turn.max_tool_response_length": Mapped(f"{_ARGS}.max_tool_response_length", 256, when=_TURNS),
    "multi_turn.tool_response_truncate_side": Mapped(f"{_ARGS}.tool_response_truncate_side", "middle", when=_TURNS),
    "multi_turn.format": Mapped("the notation of tool calls: that of Hermes or of Llama", "hermes"),
    "multi_turn.num_repeat_rollouts": Ignored("rollout.n is the number of rollouts of a task"),
    **ignored(
        "tokens of a conversation are never tokenized again",
        "multi_turn.use_inference_chat_template multi_turn.tokenization_sanity_check_mode "
        "multi_turn.enable_tokenization_sanity_check multi_turn.use_all_traj",
    ),
    "multi_turn.completion_callback": Restricted((None,), "write an environment, and use workflow.kind multi_turn"),
    "chat_scheduler": Restricted((None,), "write an environment, and use workflow.kind multi_turn"),
    "agent.agent_loop_config_path": Mapped(
        "must be unset: an agent loop of your own is a workflow in a RunConfig", type=Path
    ),
    "agent.default_agent_loop": Mapped("single_turn_agent or tool_agent", "single_turn_agent"),
    "agent.agent_loop_manager_class": Restricted((None,), "use a RunConfig with workflow.kind"),
    "agent.custom_async_server": Restricted((None,), _SERVER),
    "agent": Ignored("all rollouts of a batch are requested at once"),
}
"""Relative to `actor_rollout_ref.rollout`."""
