"""Flags of LightRFT's launchers about prompts, evaluation and supervised data."""

from __future__ import annotations

from trivium.frontdoors.tables import Entry, Ignored, Mapped, Restricted, ignored

DATA: dict[str, Entry] = {
    "prompt_data": Mapped(
        "tasks.train: a file of JSON lines or Parquet, a folder, or `folder@subfolder`; several with commas", type=str
    ),
    "prompt_data_probs": Mapped("sampling probability of each data set; unset: the sets are concatenated", type=object),
    "prompt_split": Mapped("tasks.train.split, if prompt_data is a folder", "train"),
    "eval_data": Mapped("tasks.eval; unset: the eval_split of prompt_data, if that folder has one", type=str),
    "eval_split": Mapped("tasks.eval.split, if eval_data is a folder", "test"),
    "max_eval_samples": Mapped("sets tasks.eval.limit", 500),
    "pretrain_data": Mapped("rows of a supervised loss that is added to the policy loss; only PPOTrainerVL", type=str),
    "pretrain_data_probs": Mapped("sampling probability of each set of pretrain_data", type=object),
    "pretrain_split": Mapped("the split of pretrain_data", "train"),
    "input_key": Mapped("sets tasks.train.prompt", "input"),
    "output_key": Mapped("the column with the completion of pretrain_data", "output"),
    "images_key": Mapped("sets tasks.train.images", "image"),
    "reference_key": Mapped(
        "the column with the reference; else reward_model.ground_truth, ground_truth, extra_info.constraints",
        "reference",
    ),
    "label_key": Mapped("the column with the name of the row's reward rule; else extra_info.label", "label"),
    "input_template": Mapped(
        "tasks.train.template, if apply_chat_template is off; `{}` is replaced by the prompt", type=str
    ),
    "apply_chat_template": Mapped("model.chat_template", False, convert={False: "plain"}),
    "system_prompt": Mapped("sets tasks.train.system", type=str),
    "system_prompt_path": Mapped(
        "tasks.train.system: the text of this file, or the one prompt of a YAML file", type=str
    ),
    "max_samples": Mapped("sets tasks.train.limit", 1_000_000),
    "prompt_max_len": Mapped("with text_only: engine.max_context is the sum of this and generate_max_len", 1024),
    "generate_max_len": Mapped("engine.sampling.max_new_tokens", 1024),
    "max_len": Restricted((None,), "set prompt_max_len and generate_max_len"),
    "limit_mm_image_per_prompt": Mapped("maximum number of images in a prompt; -1: no limit", -1),
    **ignored("videos are not supported: a row with one is an error", "videos_key limit_mm_video_per_prompt fps"),
    "max_pixels": Restricted((None,), "set it in preprocessor_config.json of the model, which engine and trainer read"),
    "dataloader_num_workers": Ignored("all rows are read at the start"),
}
