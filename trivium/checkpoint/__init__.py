"""Checkpoints: complete or absent. Atomic directories, the store of a run, who may write when, remote copies."""
