"""LightRFT's actor, critic and experiences over the core's models, engine and batches."""
