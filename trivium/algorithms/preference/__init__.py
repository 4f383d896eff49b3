"""Preference learning: the losses, and their objectives."""
