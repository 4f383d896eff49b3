"""Checkpoints, each complete or absent: atomic directories, the store of a run, saves in the background, copies."""
