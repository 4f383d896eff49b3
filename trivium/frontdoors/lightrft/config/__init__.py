"""LightRFT's flags: how they are read, the table of their translations, and the sections that need rules."""
