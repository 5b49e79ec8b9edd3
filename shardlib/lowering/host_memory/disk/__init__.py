"""Optimizer state that rests in files: a step in parts, each of which reads a part of the state,
updates it, and writes it back.
"""
