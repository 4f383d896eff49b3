"""Writes metrics to logs and services. A monitor is built as `M(config, run_dir=..., resume_step=...)`; a fan-out feeds
several."""
