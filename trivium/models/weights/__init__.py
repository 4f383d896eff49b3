"""Weights: reading, writing, filling models, adapters, 8 and 4 bits."""
