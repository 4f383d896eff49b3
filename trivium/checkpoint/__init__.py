"""Checkpoints, each complete or absent: atomic directories, the store of a run, background saves, remote copies."""
