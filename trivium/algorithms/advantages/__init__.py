"""Advantage estimators: what each sampled token was worth."""
