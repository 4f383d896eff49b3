"""Training on several ranks: their processes, data parallelism, FSDP2."""
