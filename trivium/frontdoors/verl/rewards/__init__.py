"""verl's scorers and the base classes of its reward managers."""
