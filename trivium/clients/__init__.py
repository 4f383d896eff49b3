"""Clients that several packages use: HTTP endpoints, chat completions, the Hugging Face cache."""
