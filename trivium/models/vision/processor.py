"""Processors of multimodal models in the format of Hugging Face. Without torchvision, they read images only."""

from __future__ import annotations

import copy
import json
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trivium.clients.hub import source_of
from trivium.foundation.errors import DataError, MissingPackage, TriviumError

_TEXT_FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma2", "phi3")
"""Model types without a processor."""
_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")

# transformers is imported inside the functions: reading a config that names a model must not wait for torch.


def hf_processor(name_or_path: str | Path, **kwargs: object) -> Any | None:
    """The processor of a vision or audio model, from a model directory (without network access) or a hub id; None for a
    text model.

    All errors of loading a processor are raised, so that a vision model is never used as a text model by mistake.
    Without torchvision, and with `backend="pil"`, a processor of images and videos reads images only. `kwargs` are
    passed to `from_pretrained`. Raises DataError for a missing directory, and for a multimodal model without the files
    of its processor; MissingPackage without pillow or num2words.
    """
    name, options = source_of(name_or_path, kwargs)
    directory = Path(name)
    if directory.is_dir() and not _names_processor(directory) and _is_text_model(directory):
        return None
    from transformers import PreTrainedTokenizerBase

    try:
        kind = _multimodal_kind(name, options)
        if kind is None and directory.is_dir() and not _names_processor(directory):
            return None
        if kind is not None:
            _require_packages(kind, name)
        processor = _load(name, options)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError) as error:
        if isinstance(error, TriviumError):
            raise
        raise DataError(
            f"the processor of {name}",
            f"{type(error).__name__}: {error}",
            "save the model's processor in the directory again (processor.save_pretrained)",
        ) from error
    if not isinstance(processor, PreTrainedTokenizerBase):
        return processor
    orphans = [file for file in _FILES if (directory / file).is_file()]
    if orphans:
        raise DataError(
            f"the processor of {name}",
            f"{', '.join(orphans)} is there, but names no class that this transformers version knows",
            "add `processor_class` to it, or install the transformers version the model asks for",
        )
    if kind is not None:
        raise DataError(
            f"the processor of {name}, a {kind} model",
            f"none of {', '.join(_FILES)} is there",
            "save the model's processor in the directory (processor.save_pretrained)",
        )
    return None  # AutoProcessor falls back to the tokenizer of a text model


def _load(name: str, options: dict[str, Any]) -> Any:
    from transformers import AutoProcessor

    reads_videos = find_spec("torchvision") and options.get("backend") != "pil"  # the PIL form reads no videos
    kind = None if reads_videos else _processor_class(name, options)
    if kind is None or "video_processor" not in kind.get_attributes():
        return AutoProcessor.from_pretrained(name, **options)
    return _images_only(kind).from_pretrained(name, **options)


def _images_only(kind: Any) -> Any:
    """A subclass of a processor class without the video processor."""

    def get_attributes(cls: Any) -> list[str]:
        return [part for part in kind.get_attributes() if part != "video_processor"]

    def parts(cls: Any, name: str, processor_dict: Any = None, **options: Any) -> list[Any]:
        loaded = kind._get_arguments_from_pretrained.__func__(cls, name, processor_dict, **options)
        loaded.insert(kind.get_attributes().index("video_processor"), None)
        return loaded

    methods = {
        "get_attributes": classmethod(get_attributes),
        "_get_arguments_from_pretrained": classmethod(parts),
        "video_processor": _NoVideos(),
    }
    return type(kind.__name__, (kind,), methods)


class _NoVideos:
    """Replaces the video processor."""

    num_frames = fps = None
    merge_size = temporal_patch_size = None

    def __call__(self, *_: object, **__: object) -> None:
        raise TriviumError("read a video", "the package 'torchvision' is not installed", "pip install torchvision")


def _processor_class(name: str, options: dict[str, Any]) -> Any | None:
    """The class that the files name, or else that transformers has for the model; None without either."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING, processor_class_from_name

    for file in _FILES:
        config = read_json(Path(name) / file)
        if "AutoProcessor" in config.get("auto_map", {}):
            return None
        if "processor_class" in config:
            return processor_class_from_name(config["processor_class"])
    config = _config(name, options)
    return None if config is None else PROCESSOR_MAPPING.get(type(config), None)


def _multimodal_kind(name: str, options: dict[str, Any]) -> str | None:
    """The type of a multimodal model; None for a text model."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    config = _config(name, options)
    if config is None:
        return None
    towers = ("vision_config", "audio_config")
    has_tower = any(getattr(config, tower, None) is not None for tower in towers)
    return config.model_type if has_tower or type(config) in PROCESSOR_MAPPING else None


def _config(name: str, options: dict[str, Any]) -> Any | None:
    """The model's config; None without one, and for a type that transformers does not support."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    chosen = ("revision", "cache_dir", "token", "local_files_only", "trust_remote_code", "subfolder")
    chosen_options = {key: options[key] for key in chosen if key in options}
    if not Path(name).is_dir():
        return AutoConfig.from_pretrained(name, **chosen_options)
    if read_json(Path(name) / "config.json").get("model_type") not in CONFIG_MAPPING:
        return None
    written = (Path(name) / "config.json").read_bytes()
    return copy.deepcopy(_config_of(name, written, tuple(chosen_options.items())))  # models change their config


@lru_cache(maxsize=16)
def _config_of(directory: str, written: bytes, options: tuple[tuple[str, Any], ...]) -> Any:
    """Caches configs, which a run reads several times. `written` is the content of the file, which may change."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(directory, **dict(options))


def _require_packages(kind: str, name: str) -> None:
    needed = {"PIL": "pillow", **({"num2words": "num2words"} if kind == "smolvlm" else {})}
    for module, package in needed.items():
        if find_spec(module) is None:
            raise MissingPackage(package, "vision", f"the processor of {name}, a {kind} model")


def _names_processor(directory: Path) -> bool:
    """Whether a file of the directory names a processor."""
    if any((directory / file).is_file() for file in _FILES):
        return True
    configs = [read_json(directory / file) for file in ("config.json", "tokenizer_config.json")]
    return any({"processor_class", "auto_map"} & config.keys() for config in configs)


def _is_text_model(directory: Path) -> bool:
    """Whether the model is of a family without other inputs, so that transformers need not be asked."""
    return read_json(directory / "config.json").get("model_type") in _TEXT_FAMILIES


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
