"""The built-in engine: scheduling, decoder, caches, sampling."""
