"""One sandbox for untrusted programs: what the policy writes runs here alone."""

from __future__ import annotations

from trivium.rewards.sandbox.runs import Check, Limits, Ran, Sandbox, long_integers

__all__ = ["Check", "Limits", "Ran", "Sandbox", "long_integers"]
