"""Flags of LightRFT's launchers about prompts, evaluation and supervised data."""

from __future__ import annotations

from trivium.frontdoors.tables import Entry, Ignored, Mapped, Restricted

DATA: dict[str, Entry] = {
    "prompt_data": Mapped(
        "tasks.train: a file of JSON lines or Parquet, a folder, or `folder@subfolder`; several with commas", type=str
    ),
    "prompt_data_probs": Mapped(
        "how often each of several sets is drawn from; unset: one set after the other", type=object
    ),
    "prompt_split": Mapped("tasks.train.split, of a folder", "train"),
    "eval_data": Mapped("tasks.eval; unset: eval_split of prompt_data, where that is a folder with it", type=str),
    "eval_split": Mapped("tasks.eval.split, of a folder", "test"),
    "max_eval_samples": Mapped("tasks.eval.limit", 500),
    "pretrain_data": Mapped("supervised rows whose loss is added; PPOTrainerVL alone mixes them", type=str),
    "pretrain_data_probs": Mapped("as prompt_data_probs, of pretrain_data", type=object),
    "pretrain_split": Mapped("the split of pretrain_data", "train"),
    "input_key": Mapped("tasks.train.prompt", "input"),
    "output_key": Mapped("the column with the completion of pretrain_data", "output"),
    "images_key": Mapped("tasks.train.images", "image"),
    "reference_key": Mapped(
        "the column with the reference; else reward_model.ground_truth, ground_truth, extra_info.constraints",
        "reference",
    ),
    "label_key": Mapped("the column that says how a row is rewarded; else extra_info.label", "label"),
    "input_template": Mapped("tasks.train.template, where apply_chat_template is off; `{}` is the prompt", type=str),
    "apply_chat_template": Mapped("off: model.chat_template plain", False),
    "system_prompt": Mapped("tasks.train.system", type=str),
    "max_samples": Mapped("tasks.train.limit", 1_000_000),
    "prompt_max_len": Mapped("engine.max_context, with generate_max_len, where text_only", 1024),
    "generate_max_len": Mapped("engine.sampling.max_new_tokens", 1024),
    "max_len": Restricted((None,), "set prompt_max_len and generate_max_len"),
    "limit_mm_image_per_prompt": Mapped("the most images of a prompt; -1 for any number", -1),
    "dataloader_num_workers": Ignored("rows are read once"),
}
