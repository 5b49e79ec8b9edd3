"""Does the real compiler make of a plan what the plan promised? Ahead of time, with none of the
hardware there.
"""
