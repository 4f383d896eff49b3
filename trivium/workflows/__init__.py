"""How a task is played with a policy."""
