"""The user's model read as one value: Flax NNX, Flax Linen, or a pytree, with logical axis names
and a selection of trained arrays.

model.py  the model of a user, of Flax or a pytree, as a `Model`
names.py  logical axis names in all spellings of Flax and JAX
trees.py  pytrees by path
"""
