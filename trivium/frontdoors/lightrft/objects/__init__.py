"""LightRFT's trainer and strategies, and what they are made of."""
