"""Converts launch arguments to the Namespace that PPOTrainerVL reads."""

from __future__ import annotations

from argparse import Namespace

from trivium.frontdoors.lightrft.config.keys_of_training import betas_of
from trivium.frontdoors.lightrft.translation import settings_of
from trivium.frontdoors.tables import Settings


def namespace_of(config: object) -> Namespace:
    """Converts a Namespace, a mapping or a list of words to a Namespace for `fit`, the strategy and the data sets.

    The result has every flag of the table; unset flags have LightRFT's defaults. Raises a ConfigError that lists
    everything unsupported.
    """
    return of_settings(settings_of(config))


def of_settings(lightrft: Settings) -> Namespace:
    """Converts settings to a Namespace, as `namespace_of`."""
    values = {flag: lightrft[flag] for flag in lightrft.table.entries}
    return Namespace(**values | {"adam_betas": betas_of(values["adam_betas"])})
