"""What the rewards grade with: mathematics by how it is written, programs by their tests, other packages."""
