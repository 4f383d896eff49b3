"""The flags of LightRFT's launchers, and what each is translated to: the table of docs/lightrft.md.

A flag that is not in it is an error. So is a value that asks for what is not built: it is refused by name.
"""

from __future__ import annotations

from trivium.frontdoors.lightrft.keys_of_data import DATA
from trivium.frontdoors.lightrft.keys_of_models import ENGINE, MODELS, RANKS
from trivium.frontdoors.lightrft.keys_of_training import ALGORITHM, OPTIMISATION, RUN
from trivium.frontdoors.tables import Table

TABLE = Table({**MODELS, **DATA, **ALGORITHM, **OPTIMISATION, **ENGINE, **RANKS, **RUN})
