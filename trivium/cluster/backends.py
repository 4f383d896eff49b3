"""Backends that the seeds' documents mention and Trivium does not build: refused by name."""

from __future__ import annotations

from trivium.errors import ConfigError

_NOT_BUILT = {
    "megatron": ("training on Megatron-LM", "shards with FSDP2 and splits sequences: say `fsdp2`"),
    "veomni": ("training on VeOmni", "shards with FSDP2 and splits sequences: say `fsdp2`"),
    "sglang": ("rollouts by SGLang", "samples with engines of its own: say `torch`"),
}
"""Name -> (what it would do, what Trivium does instead)."""


def refuse_backend(name: str) -> None:
    """Raises ConfigError where `name` (a strategy or an engine, in any spelling) is a backend that is not built."""
    known = name.lower().replace("-", "").replace("_", "")
    for backend, (what, instead) in _NOT_BUILT.items():
        if known.startswith(backend):
            raise ConfigError(f"{what} ({name!r})", f"Trivium has no {backend} backend", f"Trivium {instead}")
