"""The user's model read as one value: Flax NNX, Flax Linen, or a pytree, with logical axis names
and what is trained.

"""
