"""verl's trainer, its roles and pools, and what they are made of."""
