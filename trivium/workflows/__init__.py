"""Workflows: how a policy rolls out a task."""
