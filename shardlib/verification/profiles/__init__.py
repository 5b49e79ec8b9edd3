"""Profiles that a run has recorded.

recorded_steps.py   the steps of a plan in a profile of JAX, and where a run has its profiles
"""
