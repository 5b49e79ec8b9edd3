"""Attention of a sequence that is sharded over a mesh axis.

All functions are manual over the axis (`jax.shard_map`): arrays are one device's shards. Every form
is exact: results and gradients are those of attention on one device.

block.py     attention of one block of queries to one block of keys, and its gradient, as partial
             results that can be combined; the positions of a sequence on each device
dispatch.py  heads, kernels, and the exchange of keys and values: gathered, for heads, or around a
             ring
"""
