"""The flags of LightRFT's launchers and their translations: the table of docs/lightrft.md.

Unknown flags and unsupported values are errors.
"""

from __future__ import annotations

from trivium.frontdoors.lightrft.config.keys_of_data import DATA
from trivium.frontdoors.lightrft.config.keys_of_models import ENGINE, MODELS, RANKS
from trivium.frontdoors.lightrft.config.keys_of_training import ALGORITHM, OPTIMISATION, RUN
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
"""Section of OpenRLHF 0.11 -> its flags with the same names as LightRFT's. Flags of OpenRLHF 0.8 have no section."""
OPENRLHF: dict[str, Entry] = {
    f"{section}.{name}": Moved(name) for section, names in _OPENRLHF.items() for name in names.split()
}

TABLE = Table({**MODELS, **DATA, **ALGORITHM, **OPTIMISATION, **ENGINE, **RANKS, **RUN, **OPENRLHF})
