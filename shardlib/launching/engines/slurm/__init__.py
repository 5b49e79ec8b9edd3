"""Slurm: its settings, the parts of the batch script, and the engine that puts them together."""
