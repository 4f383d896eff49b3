"""Rewards from LightRFT's arguments: functions, recipes, rules, reward models and services."""
