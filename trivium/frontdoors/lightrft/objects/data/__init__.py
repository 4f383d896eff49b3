"""LightRFT's data sets, and the order of their samples."""
