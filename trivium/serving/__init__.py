"""The current policy behind an OpenAI-compatible endpoint that records what agents roll out, token by token."""
