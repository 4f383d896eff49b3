"""What follows from a config: threads, ranks, sizes and memory."""
