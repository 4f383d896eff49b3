"""Channels that carry weights from the trainer to the explorers; one is chosen in assemble.py."""
