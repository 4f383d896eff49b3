"""The flags of LightRFT's launchers, and what each is translated to: the table of docs/lightrft.md.

A flag that is not in it is an error. So is a value that is not supported.
"""

from __future__ import annotations

from trivium.frontdoors.lightrft.keys_of_data import DATA
from trivium.frontdoors.lightrft.keys_of_models import ENGINE, MODELS, RANKS
from trivium.frontdoors.lightrft.keys_of_training import ALGORITHM, OPTIMISATION, RUN
from trivium.frontdoors.tables import Entry, Moved, Table

_OPENRLHF = {
    "actor": "eps_clip aux_loss_coef",
    "critic": "value_clip save_value_network",
    "algo.advantage": "lambd gamma",
    "rollout": "n_samples_per_prompt temperature top_p",
    "train": "num_episodes max_epochs enable_ema ema_beta seed",
    "data": "input_key label_key input_template apply_chat_template max_samples prompt_split max_len",
    "ckpt": "save_steps",
    "logger": "logging_steps",
    "ds": "zero_stage zpg adam_offload overlap_comm grad_accum_dtype packing_samples load_in_4bit value_head_prefix",
}
"""Flags of OpenRLHF 0.11 by their section: those that have a name of LightRFT's. Those of 0.8 have no section."""
OPENRLHF: dict[str, Entry] = {
    f"{section}.{name}": Moved(name) for section, names in _OPENRLHF.items() for name in names.split()
}

TABLE = Table({**MODELS, **DATA, **ALGORITHM, **OPTIMISATION, **ENGINE, **RANKS, **RUN, **OPENRLHF})
