"""Translates LightRFT's data flags to the section `tasks`: sets of rows in files and folders, alone or mixed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from trivium.config.reading import read_bounded
from trivium.errors import ConfigError, Problem, TriviumError, described
from trivium.frontdoors.lightrft.config.prompt_sets import is_here, mixed_places, rows_of, sets_of, source_of
from trivium.frontdoors.tables import Settings

MIXED = "trivium.frontdoors.lightrft.mixed_tasks:mixed"
_IMAGES = "images"
"""The default images column of a task source."""
_FIRST = 100
"""Number of rows to search for a column."""


def probabilities_of(value: object, sets: Sequence[str], where: str, problems: list[Problem]) -> list[float] | None:
    """Returns the sampling probabilities of the sets, which sum to 1. Returns None for a single set, no value or an
    invalid value, which is added to `problems`."""
    if value is None or len(sets) < 2:
        return None
    parts = value if isinstance(value, list | tuple) else str(value).split(",")
    try:
        weights = [float(part) for part in parts]
    except (TypeError, ValueError):
        weights = []
    if len(weights) != len(sets) or min(weights, default=0) < 0 or not sum(weights) > 0:
        do = f"give {len(sets)} numbers, separated by commas, as many as sets"
        problems.append(Problem(where, repr(value), f"{len(sets)} sets", do))
        return None
    return [weight / sum(weights) for weight in weights]


def has_split(name: str, split: str) -> bool | None:
    """Whether a folder has a split. Returns None if the folder is not on this machine, and False for a file."""
    source = source_of(name, split)
    folder = Path(source["path"])
    if source["kind"] != "datasets":
        return False
    if not folder.is_dir():
        return None
    if (folder / "dataset_dict.json").is_file():
        return split in json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8")).get("splits", ())
    files = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return any(split in re.split(r"[^A-Za-z0-9]+", file) for file in files)


def system_prompt(text: str | None, path: str | None) -> str | None:
    """Returns the system prompt: `text`, or the content of the file `path`, which is text or YAML with one prompt.

    Raises ConfigError for an unreadable file, and for a file of several prompts.
    """
    if text or not path:
        return text
    file = Path(path).expanduser()
    try:
        content = read_bounded(file)
        prompts: Any = yaml.safe_load(content) if file.suffix in (".yaml", ".yml") else content
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"system_prompt_path {path}", str(error), "name a file of text, or of YAML") from error
    named = list(prompts.values()) if isinstance(prompts, Mapping) else [prompts]
    if len(named) != 1 or not isinstance(named[0], str):
        content = f"{len(named)} prompts: {', '.join(map(str, prompts))}" if len(named) != 1 else described(named[0])
        raise ConfigError(f"one system prompt in {path}", content, "write the one to use into a file, or system_prompt")
    return named[0].strip()


def tasks_of(lightrft: Settings, problems: list[Problem]) -> dict[str, Any]:
    """Returns the section `tasks` with `train`, and with `eval` if the flags name evaluation data."""
    if not lightrft["prompt_data"]:
        return {}
    limit = lightrft["max_samples"] if lightrft.has("max_samples") else None
    try:
        tasks = {"train": _taskset(lightrft, "prompt", lightrft["prompt_data"], limit, problems)}
        if named := evaluated(lightrft):
            tasks["eval"] = _taskset(lightrft, "eval", named, lightrft["max_eval_samples"], problems)
    except TriviumError as error:
        problems.append(Problem("prompt_data", error.asked, error.found, error.do))
        return {}
    return tasks


def evaluated(lightrft: Settings) -> str | None:
    """Returns the sets to evaluate: `eval_data`, else `prompt_data` if all its sets have the evaluation split."""
    if lightrft["eval_data"]:
        return lightrft["eval_data"]
    wanted = any(lightrft.has(name) for name in ("eval_split", "eval_steps", "max_eval_samples"))
    having = [has_split(name, lightrft["eval_split"]) for name in sets_of(lightrft["prompt_data"])]
    there = bool(having) and all(wanted if each is None else each for each in having)
    return lightrft["prompt_data"] if there else None


def _taskset(lightrft: Settings, which: str, named: str, limit: int | None, problems: list[Problem]) -> dict[str, Any]:
    """Returns the task source of the sets in a flag."""
    sets = sets_of(named)
    sources = [_columns(lightrft, source_of(name, lightrft[f"{which}_split"])) for name in sets]
    key = f"{which}_data_probs"
    weights = probabilities_of(lightrft.values.get(key), sets, key, problems)
    most = {} if limit is None else {"limit": limit}
    if len(sources) == 1:
        return sources[0] | most
    sources = [{**source, "path": str(Path(source["path"]).absolute())} for source in sources]
    args = {"sources": sources, "seed": lightrft["seed"]} | ({"probabilities": weights} if weights else {})
    return {"kind": "python", "source": MIXED, "args": args, **most}


def _columns(lightrft: Settings, source: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the source with the columns of its tasks."""
    columns: dict[str, Any] = dict(source)
    template = lightrft["input_template"]
    if template and not lightrft["apply_chat_template"]:
        field = "{" + lightrft["input_key"] + "}"
        columns["template"] = field.join(part.replace("{", "{{").replace("}", "}}") for part in template.split("{}"))
    else:
        columns["prompt"] = lightrft["input_key"]
    images = _images(lightrft, source)
    if images is not None:
        columns["images"] = images
    if images != "" and source["kind"] == "datasets":
        columns["image_root"] = source["path"]
    if system := system_prompt(lightrft["system_prompt"], lightrft["system_prompt_path"]):
        columns["system"] = system
    return columns


def _images(lightrft: Settings, source: Mapping[str, Any]) -> str | None:
    """Returns the images column of a source: "" disables images, None uses the default column `images`."""
    key = lightrft["images_key"]
    if lightrft["text_only"]:
        return ""
    if key == _IMAGES or not is_here(source):
        return None if key in (_IMAGES, lightrft.table.default_of("images_key")) else key
    return key if any(key in row for row in rows_of(source, _FIRST)) else ""


def prompts(lightrft: Settings) -> int | None:
    """Returns the number of prompts in an episode, or None if a set is not on this machine."""
    sets = sets_of(lightrft["prompt_data"])
    sources = [source_of(name, lightrft["prompt_split"]) for name in sets]
    if not all(map(is_here, sources)):
        return None
    weights = probabilities_of(lightrft.values.get("prompt_data_probs"), sets, "prompt_data_probs", [])
    lengths = [len(rows_of(source)) for source in sources]
    return min(sum(1 for _ in mixed_places(lengths, weights, lightrft["seed"])), lightrft["max_samples"])
