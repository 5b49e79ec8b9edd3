"""Engines, from a job to what Slurm, Kubernetes, Cloud TPU, Ray or SkyPilot are given: one file or
room each, and a row in `table`. What an engine is stands in `shared.engine`.
"""
