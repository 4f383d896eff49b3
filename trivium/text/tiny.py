"""Tiny models: a real tokenizer and a real Hugging Face model, built offline from a seed.

The tokenizer has one token per character (or per byte) and one per role, so a prompt costs a tiny model few tokens:
`<|user|>3+4=<|end|><|assistant|>`.
"""

from __future__ import annotations

import logging
import string
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from trivium.config import ModelConfig
from trivium.foundation.atomic import MANIFEST, commit, staging_directory, verify_files, writing
from trivium.foundation.errors import DataError
from trivium.foundation.randomness import stream
from trivium.models.backbone.shape import shape_of
from trivium.planning.model_shape import ModelShape

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

_log = logging.getLogger("trivium")
ASCII = string.digits + string.ascii_letters + string.punctuation + " \n"
"""Every printable ASCII character, space and newline."""
ROLES = ("system", "user", "assistant", "tool")
END, PAD, UNKNOWN = "<|end|>", "<|pad|>", "<|unk|>"
TEMPLATE = (
    "{% for message in messages %}"
    f"{{% if message.role not in {ROLES} %}}"
    "{{ raise_exception('unknown role ' + message.role) }}{% endif %}"
    "{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


class TinyModel:
    """A small, randomly initialised model with its own tokenizer. Needs no download."""

    class Config(ModelConfig):
        has_random_weights: ClassVar[bool] = True
        kind: str = "tiny"
        architecture: Literal["qwen3", "llama", "gpt2"] = "qwen3"
        """Which Hugging Face model class."""
        layers: int = Field(default=2, ge=1)
        """Transformer blocks."""
        hidden: int = Field(default=64, ge=1)
        """Width of the residual stream."""
        heads: int = Field(default=4, ge=1)
        """Query heads."""
        kv_heads: int | None = Field(default=None, ge=1)
        """Key and value heads; unset: as many as `heads` (always, for gpt2)."""
        head_dim: int | None = Field(default=None, ge=1)
        """Width of a head; unset: `hidden / heads` (always, for gpt2)."""
        mlp: int = Field(default=128, ge=1)
        """Width of the feed-forward layers."""
        max_position: int = Field(default=512, ge=2)
        """Longest sequence, in tokens."""
        tied: bool = True
        """Whether input and output share one embedding."""
        alphabet: str = Field(default="ascii", min_length=1)
        """`ascii` (printable characters), `bytes` (any text, one token per UTF-8 byte), or the characters themselves as
        one text."""

        @model_validator(mode="after")
        def _shapes_fit(self) -> Self:
            if self.head_dim is None and self.hidden % self.heads:
                raise ValueError(f"hidden {self.hidden} is not a multiple of heads {self.heads}; or set head_dim")
            if self.heads % self.num_kv_heads:
                raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
            if self.architecture != "gpt2" and self.head_width % 2:
                raise ValueError(f"rotary positions need an even head_dim, not {self.head_width}")
            if self.architecture == "gpt2" and (
                self.num_kv_heads != self.heads or self.head_width * self.heads != self.hidden
            ):
                raise ValueError("gpt2 has kv_heads = heads and head_dim = hidden / heads; leave both out")
            return self

        @property
        def num_kv_heads(self) -> int:
            return self.kv_heads or self.heads

        @property
        def head_width(self) -> int:
            return self.head_dim or self.hidden // self.heads

        def tokenizer(self) -> PreTrainedTokenizerFast:
            """Its tokenizer, without building it."""
            # With random weights, a policy writes roles in the midst of a sum.
            return tiny_tokenizer(self.alphabet, self.max_position, strips=True)

        def described(self) -> PretrainedConfig:
            """Its config.json, without building it."""
            return _model_config(self, self.tokenizer())

        def shape(self) -> ModelShape:
            """Its sizes, without building it."""
            return _shape(type(self), self.model_dump_json())

    def __init__(self, config: Config, *, seed: int) -> None:
        self.config, self.seed = config, seed

    def materialize(self, directory: Path) -> Path:
        """Builds model and tokenizer in `directory` unless they exist. The weights depend only on the seed.

        The write is atomic. Raises RunDirError if existing files have changed since they were built.
        """
        import torch
        from transformers import GenerationConfig
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # transformers' progress bars would break into the console's table
        if (directory / MANIFEST).is_file():
            verify_files(directory, step=0)
            return directory
        if (directory / "config.json").is_file():
            _log.warning("%s has no %s: its files are used as they are", directory, MANIFEST)
            return directory
        if directory.exists() and any(directory.iterdir()):
            raise DataError(
                f"build a tiny model in {directory}",
                "a directory that holds other files",
                "choose an empty or new run directory",
            )
        tokenizer = self.config.tokenizer()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream(self.seed, "tiny", "weights"))
            model = self._model(tokenizer)
        model.generation_config = GenerationConfig(
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
        )
        staging = staging_directory(directory)
        with writing(staging):
            tokenizer.save_pretrained(staging)
            model.save_pretrained(staging)
            self._save_processor(staging)
        commit(staging, directory, step=0)
        return directory

    def _model(self, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
        """The model with random weights from torch's generator."""
        import torch
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_config(_model_config(self.config, tokenizer), dtype=torch.float32)

    def _save_processor(self, directory: Path) -> None:
        """Writes the files of the model's processor. A text model has none."""


def tiny_tokenizer(
    alphabet: str = "ascii",
    max_length: int = 512,
    *,
    more: Sequence[str] = (),
    template: str = TEMPLATE,
    strips: bool = False,
) -> PreTrainedTokenizerFast:
    """One token per character of the alphabet (`ascii`, `bytes`, or the characters), then roles, end, pad, unknown, and
    `more` special tokens. `strips` keeps them out of the text of completions.

    A character outside the alphabet becomes `<|unk|>`; `bytes` encodes everything and has no unknown token.
    """
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=_backend(alphabet, more),
        chat_template=template,
        model_max_length=max_length,
        additional_special_tokens=[*_specials(alphabet)[: len(ROLES)], *more],
        clean_up_tokenization_spaces=False,
        strip_special_tokens=strips,
        **_named(alphabet),
    )


def _backend(alphabet: str, more: Sequence[str]) -> Tokenizer:
    """A BPE without merges: each character, or byte, is a token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    by_byte, specials = alphabet == "bytes", _specials(alphabet)
    vocabulary = {piece: number for number, piece in enumerate([*vocabulary_of(alphabet), *more])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=None if by_byte else UNKNOWN))
    if by_byte:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
    else:
        backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (*specials, *more)])
    return backend


def _named(alphabet: str) -> dict[str, Any]:
    """The special tokens that have a name."""
    return {"eos_token": END, "pad_token": PAD, **({} if alphabet == "bytes" else {"unk_token": UNKNOWN})}


def vocabulary_of(alphabet: str) -> list[str]:
    """Every token, by number."""
    pieces = _byte_pieces() if alphabet == "bytes" else dict.fromkeys(ASCII if alphabet == "ascii" else alphabet)
    return [*pieces, *_specials(alphabet)]


def _specials(alphabet: str) -> list[str]:
    return [*(f"<|{role}|>" for role in ROLES), END, PAD, *([] if alphabet == "bytes" else [UNKNOWN])]


def _byte_pieces() -> list[str]:
    """The characters that stand for bytes 0..255 in byte-level vocabularies (Radford et al. 2019), in that order."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


@cache  # checks, plan and preflight ask for it 25 times, which was a tenth of the start of a tiny run
def _shape(section: type[TinyModel.Config], values: str) -> ModelShape:
    return shape_of(section.model_validate_json(values).described())


def _model_config(config: TinyModel.Config, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    from transformers import AutoConfig

    return AutoConfig.for_model(
        config.architecture,
        vocab_size=len(tokenizer),
        **sizes_of(config),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        # transformers' default 0.02 suits widths of thousands; at this size training would start on a plateau.
        initializer_range=config.hidden**-0.5,
    )


def sizes_of(config: TinyModel.Config) -> dict[str, Any]:
    """The sizes in a config.json, by the key names of the architecture."""
    if config.architecture == "gpt2":
        return {
            "tie_word_embeddings": config.tied,
            "n_layer": config.layers,
            "n_embd": config.hidden,
            "n_head": config.heads,
            "n_inner": config.mlp,
            "n_positions": config.max_position,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        }
    return {
        "tie_word_embeddings": config.tied,
        "num_hidden_layers": config.layers,
        "hidden_size": config.hidden,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_width,
        "intermediate_size": config.mlp,
        "max_position_embeddings": config.max_position,
    }
