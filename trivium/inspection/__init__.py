"""Reads run directories: `trivium rollouts`, `replay`, `doctor`, `report` and `view` stand on `RecordedRun`."""
