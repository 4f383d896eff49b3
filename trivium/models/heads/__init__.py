"""Heads of models: log-probabilities, values and scores of tokens, computed without `[tokens, vocabulary]`."""
