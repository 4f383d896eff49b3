"""Where finished groups wait for the trainer."""
