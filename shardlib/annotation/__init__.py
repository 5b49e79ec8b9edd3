"""The user's model read as one value: Flax NNX, Flax Linen, or a pytree, with logical axis names
and a selection of trained arrays.

flax.py   models of Flax, Linen and NNX, and pytrees with state
names.py  logical axis names in all spellings of Flax and JAX
tree.py   a plain pytree of parameters as a `Model`
trees.py  pytrees by path
"""
