"""A plan as a file of plain JAX.

step.py    what every such file ends with; it imports nothing of this library
"""
