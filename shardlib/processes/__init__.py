"""Processes among themselves: their place in a job, agreement, signs of life, signals, and that
none outlives its parent.

"""
