"""verl's batches of rollouts, and functions of them."""
