"""From a RunConfig to a finished run: builds the parts, runs the stages, owns the run directory, its logs, the demo."""
