"""Text and tokens: tokenizers, the renderer from conversations to tokens, offline tiny models."""

from trivium.models.vision.processor import hf_processor
from trivium.text.tokenizer import hf_tokenizer

__all__ = ["hf_processor", "hf_tokenizer"]
