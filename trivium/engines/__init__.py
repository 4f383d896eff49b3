"""Rollout engines: they sample completions of the current policy."""
