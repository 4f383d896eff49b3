"""How the weights of a user's engine reach the explorers: a state dict for the channel of its run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import load_file

from trivium.errors import ConfigError
from trivium.frontdoors.trinity.run_parts import open_run_of

if TYPE_CHECKING:
    from torch import Tensor


def set_model_state_dict(config: object, state_dict: Mapping[str, Tensor] | str | Path, trainer_step: int) -> bool:
    """Offers weights of an engine to the explorers of the Trainer that has this config, in this process, by the run's
    `sync.method`. Whether they were delivered, or can be fetched; then step and version are published. Blocks.

    The weights: tensors by Hugging Face name, or a directory with them in safetensors files. Raises ConfigError where
    no Trainer of this process has the run open, or a directory has none.
    """
    run = open_run_of(config)
    weights = state_dict if isinstance(state_dict, Mapping) else _read(Path(state_dict))
    delivered = run.channel.offer(trainer_step, list(weights.items()))
    if delivered:
        run.synchronizer.publish(trainer_step, run.channel.versions)
    return delivered


def _read(directory: Path) -> dict[str, Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"weights in {directory}", "no *.safetensors", "save them there, as `save_pretrained` of transformers does"
        )
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
