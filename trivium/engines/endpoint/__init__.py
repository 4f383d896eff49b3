"""The engine over an OpenAI-compatible endpoint."""
