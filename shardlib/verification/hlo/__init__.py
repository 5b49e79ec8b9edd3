"""Compiled programs read: collectives with their groups and loops, overlap, and the compiler's own
schedule.
"""
