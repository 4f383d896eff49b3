"""What engines, training and reward models share: backbones, heads, images, fast CPU layers, weights."""
