"""verl's datasets and samplers, and the prompts of their rows."""
