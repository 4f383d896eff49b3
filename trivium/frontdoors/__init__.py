"""The object APIs of the trainers that Trivium comes from, one package per origin."""
