"""Converts the arguments of a RayPPOTrainer to a RunConfig that holds the rows and reward functions of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from trivium.config import RunConfig, config_from_mapping
from trivium.foundation.errors import ConfigError
from trivium.frontdoors.plain_values import read
from trivium.frontdoors.tables import announce, refuse
from trivium.frontdoors.verl.data import Data, DatasetTasks, RowDataset, rows_of, split_rows
from trivium.frontdoors.verl.group_rewards import GroupRewards, Hooks, RewardedOnTake, as_manager
from trivium.frontdoors.verl.objects.datasets.prompts import CutRenderer, template_of
from trivium.frontdoors.verl.objects.datasets.user_data import DataSources, custom_dataset, custom_sampler
from trivium.frontdoors.verl.objects.roles import Needs
from trivium.frontdoors.verl.rewards.reward_loading import RewardManager, load_reward_manager
from trivium.frontdoors.verl.translation import run_dir_of, settings_of, translated
from trivium.models.vision.images import Images, check_processor, images_of
from trivium.protocols import Renderer
from trivium.runtime.build import algorithm_of
from trivium.text import hf_tokenizer
from trivium.text.renderer import ChatRenderer
from trivium.types import Batch

_VALIDATION = "val"


@dataclass
class RunSetup:
    """The components of a run, built from verl's arguments. Raises ConfigError and DataError for invalid arguments."""

    config: Any
    """A config in verl's layout, or a RunConfig."""
    tokenizer: Any
    reward_fn: Any = None
    val_reward_fn: Any = None
    sources: DataSources = field(default_factory=DataSources)
    device_name: str | None = None
    processor: Any = None
    """The model's image processor; None for a model that reads only text."""
    reward_model: Callable[[Batch], list[float]] | None = None
    """Computes the scores of Role.RewardModel, if it is mapped."""
    hooks: Hooks = field(default_factory=Hooks)
    """Callbacks to the trainer's methods that users override."""

    def __post_init__(self) -> None:
        self.from_run_config = isinstance(self.config, RunConfig)
        self.verl = settings_of({} if self.from_run_config else self.config)
        """The values of the config; verl's defaults if a RunConfig was passed."""
        announce(self.verl.notes())
        self.device = self._device()
        self._template = template_of(self.verl, self.tokenizer)
        self._images = None if self.processor is None else Images(self.processor)
        self._chat = ChatRenderer(self.tokenizer, chat_template=self._template, images=self._images)
        truncation = self.verl["data.truncation"]
        self.renderer: Renderer = (
            self._chat
            if self.from_run_config or truncation == "error"
            else CutRenderer(self._chat, self.verl["data.max_prompt_length"], truncation)
        )
        self.train_dataset, self.val_dataset = self.sources.train, self.sources.val
        self.collate_fn, self.train_sampler = self.sources.collate_fn, self.sources.sampler
        self.train: Data | None = None
        """The training rows; None if the tasks of the RunConfig are used."""
        self.val: Data | None = None
        self.rewards: GroupRewards | None = None
        """None if the rewards of the RunConfig are used."""
        self.run_config = self._over_run_config(self.config) if self.from_run_config else self._translated()
        self.val_rewards = self.rewards if self.val_reward_fn is None else self._group_rewards(self.val_reward_fn)
        self._refuse_unsupported()

    @cached_property
    def needs(self) -> Needs:
        """The models that the run uses. Raises ConfigError for a model that no role holds."""
        config, needed = self.run_config, algorithm_of(self.run_config).needs
        if needed & {"teacher", "teacher_top", "student_top"}:
            raise ConfigError(
                f"algorithm.kind {config.algorithm.kind!r}",
                "no role of RayPPOTrainer holds a teacher",
                "use `trivium.run` for distillation",
            )
        return Needs(
            critic=config.algorithm.has_critic,
            reference="ref" in needed,
            reference_in_actor=getattr(config.train, "lora", None) is not None,
            reward_model=bool(self.verl["reward_model.enable"]) or self.reward_model is not None,
        )

    def check_machine(self) -> None:
        """Raises ConfigError for a monitor that cannot log from this machine, or an engine that is not installed."""
        config = self.run_config
        numbered = enumerate(config.monitors)
        problems = [p for n, monitor in numbered for p in monitor.machine_problems(config, f"monitors[{n}]")]
        refuse([*problems, *config.engine.machine_problems(config, "engine")])

    # ------------------------------------------------------------------ the RunConfig

    def _build_sources(self) -> None:
        """Builds datasets and sampler from the classes that the config names, unless they were passed."""
        verl, section = self.verl, read(self.config, "data")
        if self.train_dataset is None:
            self.train_dataset = custom_dataset(verl, section, "train", self.tokenizer, self.processor)
        if self.val_dataset is None:
            self.val_dataset = custom_dataset(verl, section, "val", self.tokenizer, self.processor)
        if self.train_sampler is None and verl.has("data.sampler.class_path"):
            rows = self._rows(self.train_dataset, "train")
            remaining = self._data(rows, taskset="train", origin="the training set", batch=1).rows
            if self.train_dataset is None or len(remaining) < len(rows):  # the sampler counts the kept rows
                self.train_dataset = remaining
            self.train_sampler = custom_sampler(verl, section, self.train_dataset)

    def _translated(self) -> RunConfig:
        verl = self.verl
        self._build_sources()
        train = self.train = self._data(
            self._rows(self.train_dataset, "train"),
            taskset="train",
            origin="the training set",
            batch=verl["data.train_batch_size"],
            sampler=self.train_sampler,
            shuffle=bool(verl["data.shuffle"]),
            seed=verl["data.seed"] or 0,
            folder=Path(run_dir_of(verl)) / "order",
        )
        tasks = {"train": DatasetTasks.Config.of(train)}
        validation = self._rows(self.val_dataset, "val")
        mapping = translated(verl, rows=train.epoch_length, has_validation=bool(validation), device=self.device)
        if self._template is not None:
            mapping["model"]["chat_template"] = self._template
        if validation:
            tasks[_VALIDATION] = self._validation(validation)
        self.rewards = self._group_rewards(self.reward_fn)
        buffer = {"kind": "memory", "strategy": RewardedOnTake.Config.by(self.rewards, train.orders)}
        return config_from_mapping({**mapping, "buffer": buffer, "tasks": tasks})

    def _over_run_config(self, config: RunConfig) -> RunConfig:
        """Returns the RunConfig with the datasets and reward functions that were passed to the trainer."""
        schedule, mapping = config.schedule, config.model_dump(exclude_unset=True)
        tasks: dict[str, Any] = dict(config.tasks)
        if self.train_dataset is not None:
            train = self.train = self._data(
                rows_of(self.train_dataset, "train_dataset"),
                taskset="train",
                origin="the training set",
                batch=schedule.groups_per_step,
                sampler=self.train_sampler,
                shuffle=schedule.shuffle,
                seed=config.run.seed,
                folder=Path(config.run.dir) / "order",
            )
            tasks["train"] = DatasetTasks.Config.of(train)
        elif self.train_sampler is not None or self.collate_fn is not None:
            raise ConfigError(
                "a train_sampler or collate_fn with a RunConfig",
                "its tasks are read by the config's own source",
                "pass train_dataset too, or set schedule.curriculum",
            )
        if self.val_dataset is not None:
            tasks[_VALIDATION] = self._validation(rows_of(self.val_dataset, "val_dataset"))
            mapping["evaluation"] = {"taskset": _VALIDATION, **mapping.get("evaluation", {})}
        if self.reward_fn is not None or not config.rewards:
            self.rewards = self._group_rewards(self.reward_fn)
            strategy = RewardedOnTake.Config.by(self.rewards, self.train.orders if self.train is not None else None)
            mapping["buffer"] = {**mapping.get("buffer", {}), "strategy": strategy}
            mapping["rewards"] = []
        return config_from_mapping({**mapping, "tasks": tasks})

    def _refuse_unsupported(self) -> None:
        config = self.run_config
        if config.stages or config.run.mode != "both":
            raise ConfigError(
                "RayPPOTrainer over a RunConfig",
                "it has `stages`, or another run.mode than both",
                "use `trivium.run` for such a run",
            )
        if config.evaluation.held_out is not None or config.run.keep == "tokens":
            raise ConfigError(
                "RayPPOTrainer over a RunConfig",
                "it has evaluation.held_out or run.keep: tokens, which verl's workers cannot measure and record",
                "leave them out, or use `trivium.run`",
            )
        if config.has_fixed_versions:
            raise ConfigError(
                "schedule.deterministic with schedule.max_staleness above 0",
                "the workers' engines hold only the newest weights",
                "set schedule.max_staleness to 0, or schedule.deterministic to false",
            )
        if self.train is not None and self.train.orders.learns and (self.rewards is None or config.max_staleness):
            raise ConfigError(
                f"a {type(self.train_sampler).__name__}, which learns from every batch",
                "the RunConfig computes rewards during generation, or has schedule.max_staleness above 0",
                "pass a reward_fn, and leave schedule.max_staleness at 0",
            )
        if config.checkpoint.asynchronous:
            # Roles that share processes would use one process group from several threads in undefined order.
            raise ConfigError(
                "checkpoint.asynchronous with RayPPOTrainer",
                "its workers save while training waits",
                "set checkpoint.asynchronous: false, or use `trivium.run` for such a run",
            )
        model = getattr(config.model, "path", None)
        if model is None:
            return
        saved, chat = hf_tokenizer(model), self._chat
        images = None if self._images is None else images_of(model)
        ends = chat.eos_token_ids
        if saved.chat_template is not None:
            ends = ChatRenderer(saved, images=images).eos_token_ids
        if saved.get_vocab() != self.tokenizer.get_vocab() or ends != chat.eos_token_ids:
            # The rollout engines read the model directory's tokenizer.
            raise ConfigError(
                f"the tokenizer of the model {model}",
                "the one passed has other tokens, or ends turns otherwise",
                "pass the model's own: hf_tokenizer(model path)",
            )
        if self._images is not None:
            check_processor(self._images, model)

    # ------------------------------------------------------------------ data

    def _rows(self, dataset: RowDataset | None, split: str) -> list[Any]:
        """Returns the rows of a dataset, or of the files that the config names."""
        if dataset is not None:
            return rows_of(dataset, f"{split}_dataset")
        if split == "train" and not self.verl["data.train_files"]:
            raise ConfigError("training data", "neither train_dataset nor data.train_files", "pass one of the two")
        return split_rows(self.verl, split, self.verl["data.seed"] or 0)

    def _data(self, rows: Sequence[Any], *, taskset: str, **options: Any) -> Data:
        renderer = None if self.from_run_config else self._chat
        return Data.of(self.verl, taskset, rows, renderer, taskset=taskset, collate_fn=self.collate_fn, **options)

    def _validation(self, rows: Sequence[Any]) -> DatasetTasks.Config:
        data = self._data(rows, taskset=_VALIDATION, origin="the validation set", batch=1)
        self.val = replace(data, batch=max(1, len(data.rows)))  # the kept rows are one batch
        return DatasetTasks.Config.of(self.val)

    # ------------------------------------------------------------------ rewards

    def _group_rewards(self, reward_fn: RewardManager | None) -> GroupRewards:
        """Builds rewards from a reward function, or from the config."""
        if reward_fn is None:
            if self.from_run_config:
                raise ConfigError(
                    "rewards", "neither `rewards` in the RunConfig nor a reward_fn", "give one of the two"
                )
            kwargs = self.verl["reward_model.reward_kwargs"] or {}
            reward_fn = load_reward_manager(self.config, self.tokenizer, num_examine=0, **kwargs)
        pad = self.tokenizer.pad_token_id
        pad = self.tokenizer.eos_token_id if pad is None else pad
        return GroupRewards(as_manager(reward_fn, self.tokenizer), pad, self.reward_model, self.hooks)

    def _device(self) -> str:
        """Returns `cpu` or `cuda`. Raises ConfigError for a GPU that is not available, and for other devices."""
        name = self.device_name
        if name is None:
            name = getattr(self.config.train, "device", "auto") if self.from_run_config else self.verl["trainer.device"]
            name = "auto" if name == "cuda" and not self.from_run_config else name  # cuda is verl's default
        if name in (None, "auto"):
            return "cuda" if torch.cuda.is_available() else "cpu"
        name = name.partition(":")[0]  # each worker selects its device among those that Ray assigns
        if name not in ("cpu", "cuda"):
            raise ConfigError(f"device_name {name!r}", "training is built for cpu and cuda", "name one of the two")
        if name == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"device_name {name!r}", "no GPU that torch can use", "pass device_name='cpu'")
        return name
