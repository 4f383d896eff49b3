"""The current policy as an OpenAI-compatible endpoint that records what agents play, token by token."""
