"""The object API of LightRFT: what its users import, over the same parts that `trivium run` uses."""
