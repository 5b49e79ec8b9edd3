"""Attention of a sequence that is sharded over a mesh axis.

All of it is for functions that are manual over the axis (`jax.shard_map`): arrays are what one
device holds. Every form is exact: results and gradients are those of attention on one device.

block.py               attention of one block of queries to one block of keys, in parts that can be
                       added up, and its gradient
dispatch.py            heads, kernels, and the exchange of keys and values
ring.py                ring attention: keys and values go around the devices
sequence_partition.py  the positions of a sequence that each device has
"""
