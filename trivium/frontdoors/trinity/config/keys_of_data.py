"""The keys of Trinity-RFT's config for the sources of tasks and experiences (see `config_table`)."""

from __future__ import annotations

from trivium.frontdoors.tables import Entry, Ignored, KeyTable, Mapped, Restricted, ignored, under

FILLED_IN = "Trinity-RFT fills it in by itself"
_OFF = (None, False)
_JUICER = "Data-Juicer's task pipeline is not supported: prepare the data before the run"

_FORMAT: dict[str, Entry] = {
    "prompt_type": Mapped("which of the following keys are read: messages, plaintext (chatpair)", "messages"),
    "prompt_key": Mapped("tasks.<name>.prompt", "prompt"),
    "response_key": Mapped("tasks.<name>.answer; of rows with an expert's text, completion", "response"),
    "messages_key": Mapped("tasks.<name>.prompt and completion, where prompt_type is messages", "message"),
    "system_prompt": Mapped("tasks.<name>.system", type=str),
    "system_prompt_key": Restricted((None,), "write the system message into the prompt column, as messages"),
    "chosen_key": Mapped("buffer.chosen", "chosen"),
    "rejected_key": Mapped("buffer.rejected", "rejected"),
    "reply_prefix": Restricted((None,), "a given beginning of the completion is not supported: leave it out"),
    "image_key": Mapped("tasks.<name>.images", type=str),
    "video_key": Restricted((None,), "videos are not read here"),
    "workflow_key": Restricted((None,), "one workflow rolls out every row: set default_workflow_type"),
    "reward_fn_key": Restricted((None,), "one set of rewards judges every row: set default_reward_fn_type"),
    "enable_concatenated_multi_turn": Restricted(_OFF, "the last message is learnt: give each turn a row of its own"),
    "tools_key": Restricted((None, "tools"), "tools of rows are not rendered: leave it out"),
    "chat_template": Mapped("model.chat_template", type=str),
    "enable_thinking": Mapped("as model.enable_thinking, of rows that are learnt", type=bool),
    "label_key": Restricted((None,), "algorithm.kind kto reads labels: write it into the translated config"),
    **ignored("no reader of it is built", "solution_key reward_key"),
}

_SELECTOR: dict[str, Entry] = {
    "selector_type": Mapped(
        "schedule.shuffle (shuffle, random) and schedule.curriculum (offline_easy2hard, difficulty_based)",
        "sequential",
    ),
    "seed": Ignored("run.seed is the seed of everything"),
    "feature_keys": Mapped("schedule.curriculum.column, or the two of schedule.curriculum.references", ()),
    "kwargs": Mapped("schedule.curriculum: target, temperature, sampled, trials, forget, sharing", {}, dict),
}

_STORED: dict[str, Entry] = {
    "name": Mapped("the name of the taskset or buffer, in errors", ""),
    "path": Mapped("tasks.<name>.path: a file, a folder, or a Hugging Face id in the local cache", type=str),
    "split": Mapped("tasks.<name>.split, of a folder or an id", "train"),
    "subset_name": Mapped("tasks.<name>.subset, of a folder or an id", type=str),
    **under("format", _FORMAT),
    **under("data_selector", _SELECTOR),
    **under("task_selector", _SELECTOR),
    "raw": Restricted(_OFF, _JUICER),
    **ignored("it changes no result", "enable_progress_bar wrap_in_ray"),
    **ignored("sync.deadline_s bounds every wait", "max_retry_times max_retry_interval max_read_timeout"),
    **ignored("slots bound how many groups are ahead of the trainer", "capacity"),
    **ignored(
        FILLED_IN,
        "index is_eval batch_size total_epochs total_steps ray_namespace schema_type tokenizer_path algorithm_type",
        "task_type",
    ),
}

_ROLLED_OUT: dict[str, Entry] = {
    "storage_type": Mapped("tasks.<name>.kind: file", "file"),
    "repeat_times": Mapped("evaluation.samples, of an eval_taskset; schedule.group_size decides in training", 1),
    "default_workflow_type": Mapped("workflow, and its rewards", type=str),
    "default_eval_workflow_type": Mapped(
        "rewards of evaluation (a recipe); its workflow is that of training", type=str
    ),
    "default_reward_fn_type": Mapped("rewards", type=str),
    "workflow_args": Mapped(
        "with_think and format_score_coef of math_boxed_workflow; agent_max_steps, env_max_steps and is_slippery of "
        "frozen_lake_workflow; options of your own class",
        {},
    ),
    "reward_fn_args": Mapped("options of the reward", {}),
    "rollout_args.temperature": Mapped("engine.sampling.temperature (evaluation.sampling)", type=float),
    "rollout_args.top_p": Mapped("engine.sampling.top_p (evaluation.sampling)", type=float),
    "rollout_args.top_k": Mapped("engine.sampling.top_k (evaluation.sampling)", type=int),
    "rollout_args.max_tokens": Mapped("engine.sampling.max_new_tokens (evaluation.sampling)", type=int),
    "rollout_args.logprobs": Ignored("the log-probability of every token is recorded"),
    "rollout_args.n": Ignored("algorithm.repeat_times decides"),
}

_REPLAY: dict[str, Entry] = {
    "replay_buffer.enable": Mapped("buffer.strategy: replay, where reuse_cooldown_time is set", False),
    "replay_buffer.priority_fn": Mapped("buffer.strategy.priority", "linear_decay"),
    "replay_buffer.reuse_cooldown_time": Mapped("whether groups are replayed; not before the next step", type=float),
    "replay_buffer.priority_fn_args": Mapped("decay, sigma and use_count_limit of buffer.strategy", {}),
    "use_priority_queue": Mapped("as replay_buffer.enable", False),
    "reuse_cooldown_time": Mapped("as replay_buffer.reuse_cooldown_time", type=float),
    "replay_buffer_kwargs": Mapped("as priority_fn and priority_fn_args of replay_buffer", {}),
}

TASKSET = KeyTable({**_STORED, **_ROLLED_OUT, **{name: Ignored("tasks are not replayed") for name in _REPLAY}})
"""buffer.explorer_input.taskset, and the items of tasksets and eval_tasksets."""

EXPERIENCE_BUFFER = KeyTable(
    {
        **_STORED,
        **{name: Ignored("of tasksets") for name in _ROLLED_OUT},
        **_REPLAY,
        "storage_type": Mapped("buffer.kind: memory; sql between commands; files, of rows that are learnt", "queue"),
        "path": Mapped("buffer.url, where that is a database; tasks.train.path of rows that are learnt", type=str),
    }
)
"""buffer.trainer_input.experience_buffer, and the values of auxiliary_buffers."""

EXPLORER_INPUT: dict[str, Entry] = {
    "taskset": Mapped("tasks.train, see below", type=dict),
    "tasksets": Mapped("tasks.train: all of them, shuffled", (), list),
    "eval_tasksets": Mapped("tasks.eval and evaluation: all of them as one", (), list),
    "default_workflow_type": Mapped("workflow and its rewards, where the taskset names none", type=str),
    "default_eval_workflow_type": Mapped(
        "rewards of evaluation (a recipe); its workflow is that of training", type=str
    ),
    "default_reward_fn_type": Mapped("rewards, where the taskset names none", type=str),
    "system_prompt": Mapped("tasks.train.system, where the taskset has none", type=str),
    "reply_prefix": Restricted((None,), "a given beginning of the completion is not supported: leave it out"),
}

TRAINER_INPUT: dict[str, Entry] = {
    "experience_buffer": Mapped("buffer, see below", type=dict),
    "auxiliary_buffers": Mapped("tasks.<name> of an expert, for buffer.strategy mix", {}),
    "sft_warmup_dataset": Mapped("a stage of supervised steps before the others", type=dict),
    "sft_warmup_steps": Mapped("the steps of that stage", 0),
    "read_experience_strategy": Restricted((None, "fifo"), "set algorithm.sample_strategy"),
}

_PIPELINE: dict[str, Entry] = {
    "operators": Mapped("buffer.operators: what stands for each name", (), list),
    "reward_shaping": Mapped("buffer.operators: reward_shaping", (), list),
    "save_input": Ignored("every rollout is journaled in the run directory"),
    "input_save_path": Ignored("every rollout is journaled in the run directory"),
    "inputs": Restricted((None,), "the pipeline's input is what explorers generate"),
    "output": Restricted((None,), "the pipeline's output is the buffer"),
    "format": Ignored("no reader of it is built"),
    **{
        name: Restricted((None,), "Data-Juicer's operators are not supported: name operators of Trivium or yours")
        for name in ("dj_config_path", "dj_process_desc", "agent_model_name", "min_size_ratio", "priority_weights")
    },
    "clean_strategy": Ignored("no Data-Juicer runs"),
    "min_priority_score": Ignored("no Data-Juicer runs"),
    "data_dist": Ignored("no Data-Juicer runs"),
    "input_buffers": Restricted((None,), "the pipeline's input is what explorers generate"),
    "output_buffer": Ignored("the pipeline's output is the buffer"),
}

DATA_PROCESSOR: dict[str, Entry] = {
    "data_processor_url": Restricted((None,), _JUICER),
    "task_pipeline": Mapped("the rows that it writes, which taskset.path names; Data-Juicer runs it before", type=dict),
    **under("experience_pipeline", _PIPELINE),
}
