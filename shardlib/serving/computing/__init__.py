"""What computes the steps of an engine.

built.py      a user's model as what computes steps
slotted.py    models with a cache of their own, one a slot
"""
