"""Pytrees by path: which leaves are trained, which are not, and how they are initialised
exactly.
"""
