"""Runs a RunConfig: builds the parts, runs the stages, manages the run directory and its logs, and holds the demo."""
