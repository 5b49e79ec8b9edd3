"""Attention of a sequence that is sharded over a mesh axis.

    sequence_partition.py  which positions of the sequence a device has
    mask.py                which keys a query sees
    block.py               attention of a block of queries to a block of keys, in parts that can be
                           added up, and its gradient
    blocks.py              the same over many blocks, a block at a time
    rematerialised.py      attention of arrays that one device has, with gradients
    heads.py               which devices have which heads
    kernels.py             the same by kernels of TPUs and of cuDNN
    ring.py                keys and values go around the devices
    ulysses.py             keys and values are gathered; or devices exchange parts of the sequence
                           for heads

All of it is for functions that are manual over the axis (`jax.shard_map`): arrays are what one
device holds. Every form is exact: results and gradients are those of attention on one device.

"""
