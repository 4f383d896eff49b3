"""What engines, training and reward models share: sources, loading, heads, packed attention, the chunked head."""
