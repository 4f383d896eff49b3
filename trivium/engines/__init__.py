"""Rollout engines: what samples replies from the current policy."""
