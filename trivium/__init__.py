"""Trivium: reinforcement fine-tuning for language and vision-language models."""
