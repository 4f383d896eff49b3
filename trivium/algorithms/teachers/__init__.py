"""What a teacher of a policy reads."""
