"""A step that a user wrote, run under a plan.

layouts.py  where every array of the state lives, and what values of the step are pinned to
losses.py   what takes the places of the losses that it marks
"""
