"""Tokenizers by the `tokenizers` library and chat templates by Jinja, without transformers, which takes seconds to
import.

For commands that need tokens and no model. Rollouts use the tokenizer that transformers loads; `saved_tokenizer` reads
only directories for which both are known to be equal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trivium.models.vision.processor import read_json

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import AddedToken, Tokenizer

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that a template receives by name."""
_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""The classes in a tokenizer_config.json that add nothing to tokenizer.json."""
_FAMILIES = (None, "gpt2", "llama", "qwen3")
"""The model types for which transformers loads these classes as they are."""
_UNREAD = ("additional_chat_templates", "added_tokens.json")
"""Files that `saved_tokenizer` does not read and transformers does."""
_LEGACY = "special_tokens_map.json"
"""transformers reads it if tokenizer_config.json does not list the added tokens."""


class FastTokenizer:
    """What `trivium.text.renderer.ChatRenderer` uses of a tokenizer of transformers, with the same results."""

    def __init__(
        self,
        backend: Tokenizer,
        named: Mapping[str, str],
        *,
        chat_template: str | None,
        more_special: Sequence[str] = (),
        name_or_path: str = "",
        init_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """`named` are the special tokens by their names (`eos_token`, ...), `more_special` those without one, and
        `init_kwargs` the tokenizer_config.json."""
        backend.no_truncation()
        backend.no_padding()
        self.backend, self._named = backend, {name: named[name] for name in _NAMED if name in named}
        self.chat_template, self.name_or_path = chat_template, name_or_path
        self.init_kwargs = init_kwargs or {}
        self.bos_token, self.pad_token = named.get("bos_token"), named.get("pad_token")
        self.all_special_tokens = [*dict.fromkeys([*self._named.values(), *more_special])]

    @property
    def eos_token_id(self) -> int | None:
        return self._id_of("eos_token")

    @property
    def unk_token(self) -> str | None:
        return self._named.get("unk_token")

    @property
    def unk_token_id(self) -> int | None:
        return self._id_of("unk_token")

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Number -> added token."""
        return self.backend.get_added_tokens_decoder()

    def get_vocab(self) -> dict[str, int]:
        """Token -> number."""
        return self.backend.get_vocab(with_added_tokens=True)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """The number of a token."""
        return self.backend.token_to_id(token)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without added special tokens."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(
        self, tokens: Sequence[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """The text of tokens. Spaces are never cleaned up."""
        del clean_up_tokenization_spaces
        return self.backend.decode([*tokens], skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        chat_template: str | None = None,
        tokenize: bool = False,
        add_generation_prompt: bool = False,
    ) -> str:
        """The text of a conversation. Raises TemplateError if the template refuses it, ValueError if it is empty."""
        assert not tokenize
        if not conversation:
            raise ValueError("a chat template is applied to at least one message")
        template = chat_template if chat_template is not None else self.chat_template
        assert template is not None
        return _compiled(template).render(
            messages=[{key: value for key, value in each.items() if value is not None} for each in conversation],
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self._named,
        )

    def _id_of(self, name: str) -> int | None:
        return self.backend.token_to_id(self._named[name]) if name in self._named else None


def saved_tokenizer(directory: Path) -> FastTokenizer | None:
    """The tokenizer of a model directory; None if only transformers can load it as `hf_tokenizer` does."""
    from tokenizers import Tokenizer

    path, config = directory / "tokenizer.json", read_json(directory / "tokenizer_config.json")
    plain = config.get("tokenizer_class") in _CLASSES and "auto_map" not in config and path.is_file()
    if not plain or read_json(directory / "config.json").get("model_type") not in _FAMILIES:
        return None
    if config.get("split_special_tokens") or any((directory / name).exists() for name in _UNREAD):
        return None
    if _names_more(config) or ("added_tokens_decoder" not in config and (directory / _LEGACY).exists()):
        return None
    backend, file = Tokenizer.from_file(str(path)), directory / "chat_template.jinja"
    template = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    named = {name: _text(config[name]) for name in _NAMED if config.get(name) is not None}
    if backend.padding is not None or not {"pad_token", "eos_token"} & {*named}:
        return None  # transformers takes the pad token from there; `hf_tokenizer` refuses a tokenizer without both
    more = [
        _text(token) for token in config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    ]
    added = {token.content: (number, token) for number, token in backend.get_added_tokens_decoder().items()}
    declared = [(int(number), each) for number, each in config.get("added_tokens_decoder", {}).items()]
    same = all(each["content"] in added and _equal(number, each, *added[each["content"]]) for number, each in declared)
    special = all(token in added and added[token][1].special for token in (*named.values(), *more))
    if not (same and special) or not isinstance(template, str | None) or "<end_of_turn>" in added:
        return None
    return FastTokenizer(
        backend,
        named,
        chat_template=template,
        more_special=more,
        name_or_path=str(directory),
        init_kwargs=config,
    )


def _names_more(config: Mapping[str, Any]) -> bool:
    """Whether a tokenizer_config.json names special tokens beyond `_NAMED`, or one in a form that transformers
    refuses."""
    texts = {name for name, value in config.items() if name.endswith("_token") and isinstance(value, str | dict)}
    named = [config[name] for name in _NAMED if name in texts]
    untyped = any(isinstance(token, dict) and "__type" not in token for token in named)
    mapped = any(isinstance(config.get(name), dict) for name in ("extra_special_tokens", "additional_special_tokens"))
    return bool(texts - {*_NAMED}) or untyped or mapped or "model_specific_special_tokens" in config


def _equal(number: int, declared: Mapping[str, Any], actual: int, token: AddedToken) -> bool:
    """Whether an added token of a tokenizer_config.json is that of tokenizer.json."""
    flags = ("special", "single_word", "lstrip", "rstrip", "normalized")
    return number == actual and all(declared.get(flag, False) == getattr(token, flag) for flag in flags)


def _text(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


@lru_cache(maxsize=64)
def _compiled(template: str) -> Template:
    """Compiles a chat template with what transformers offers it."""
    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """`{% generation %}` marks what the policy writes, and changes no text."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            # As in transformers, a variable that is set inside keeps its former value outside.
            return nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

        def _same(self, caller: Callable[[], str]) -> str:
            return caller()

    class Dict:
        """Makes a dict. Hides the attributes of Python's `dict`, for templates are not trusted."""

        def __call__(self, *args: Any, **entries: Any) -> dict[Any, Any]:
            return dict(*args, **entries)

        def fromkeys(self, *args: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args)

    class PublicNamespace(Namespace):
        """A namespace without attributes of Python's own, for templates are not trusted."""

        def __setitem__(self, name: str, value: object) -> None:
            if name.startswith("_"):
                raise SecurityError(f"a namespace of a template with the attribute {name!r}")
            super().__setitem__(name, value)

    def namespace(*args: Any, **attributes: Any) -> PublicNamespace:
        result = PublicNamespace()
        for name, value in dict(*args, **attributes).items():
            result[name] = value
        return result

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def as_json(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = as_json  # Jinja's own escapes HTML
    environment.globals["raise_exception"] = raise_exception
    environment.globals["namespace"] = namespace
    environment.globals["dict"] = Dict()
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)
