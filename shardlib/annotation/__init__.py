"""The user's model read as one value: Flax NNX, Flax Linen, or a pytree, with logical axis names
and what is trained.

flax.py   which part of what a Linen loss returns is a metric, and which is a mutated collection
          of the model?
names.py  logical axis names that a user has written on arrays, in all spellings of Flax and JAX
tree.py   what does a plain pytree of parameters look like as a `Model`?
trees.py  pytrees by path
"""
