"""A step as separable items, each with the terms of its cost: kernels, collectives, gathers of
parameters, and live buffers.
"""
