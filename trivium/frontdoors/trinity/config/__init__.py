"""Trinity-RFT's config: the table of its keys, the sections that rules derive from them, and registries of names."""
