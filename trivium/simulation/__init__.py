"""Runs the commands of a distributed run on a simulated computer, in virtual time, from a seed."""
