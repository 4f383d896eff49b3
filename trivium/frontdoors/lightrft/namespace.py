"""Launch arguments as the Namespace that PPOTrainerVL reads."""

from __future__ import annotations

from argparse import Namespace

from trivium.frontdoors.lightrft.translation import betas_of, settings_of
from trivium.frontdoors.tables import Settings


def namespace_of(config: object) -> Namespace:
    """Every flag of the table by its name, with LightRFT's default where it is not set: a Namespace, a mapping or a
    list of words as what `fit`, the strategy and the data sets read.

    Raises ConfigError with everything in it that cannot be had.
    """
    return of_settings(settings_of(config))


def of_settings(lightrft: Settings) -> Namespace:
    """The same of settings that were read."""
    values = {flag: lightrft[flag] for flag in lightrft.table.entries}
    return Namespace(**values | {"adam_betas": betas_of(values["adam_betas"])})
