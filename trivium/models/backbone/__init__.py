"""Pretrained models without their heads: loading, packed attention, shared prefixes, expert routing, images."""
