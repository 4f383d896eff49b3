"""The config sections of algorithms, and the algorithm that follows from each."""
