"""The words that costs are written in: terms of a symbolic product, local sizes, the decisions that
pricing reads, and framework profiles.
"""
