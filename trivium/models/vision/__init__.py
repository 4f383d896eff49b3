"""Images: processors, pixels, and the image encoders of models."""
