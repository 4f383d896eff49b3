"""`trivium view`: a local page over run directories."""
