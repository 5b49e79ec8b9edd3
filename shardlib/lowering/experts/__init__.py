"""Tokens are dispatched to experts on other devices, and their results combined.

    groups.py                which mesh axes share what, and how rows are exchanged and multiplied
    grouped.py               a matmul of rows with the matrix of their group
    permute.py               rows from place to place, with gathers alone in both directions
    queue.py                 which assignments go where, and which are dropped
    dispatch_and_combine.py  rows are dispatched to the devices of their experts and combined again,
                             as many at a time as there is room
    overflow_rounds.py       one round, and the further ones where routing is skewed
    routed.py                all of it: tokens in, results out

All of it is for functions that are manual over the axes (`jax.shard_map`): arrays are what one
device holds. Every form is exact: results, gradients and drops are those of
`shardlib.functions.experts` on one device.
"""
