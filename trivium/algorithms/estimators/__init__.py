"""Advantage estimators: functions that compute the advantage of each sampled token."""
