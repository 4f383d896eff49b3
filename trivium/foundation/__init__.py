"""What stands on nothing else: errors, names, numbers, time, randomness, roles."""
