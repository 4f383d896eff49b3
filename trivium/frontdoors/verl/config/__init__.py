"""verl's config: the table of its keys, how it is read, and the sections that the keys translate to."""
