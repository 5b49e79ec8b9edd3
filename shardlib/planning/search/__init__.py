"""Best-first branch and bound over the space, and what it finds: the fastest plan that fits, a
ranking, or why nothing fits.
"""
