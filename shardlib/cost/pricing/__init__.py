"""Seconds and bytes of candidate plans from the tables: compute, exposed collectives, pipeline
bubbles, optimizer, memory.
"""
