"""Inference over a chain of unlike devices: the model as a chain, where it is cut, and on which
devices its runs lie.
"""
