"""The engine over vLLM: requests, processes, weights."""
