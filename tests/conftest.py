"""Fixtures that tests of several folders share."""

from postgres import postgres

__all__ = ["postgres"]
