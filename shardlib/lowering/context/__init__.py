"""How do tokens look at each other when the sequence is cut over a mesh axis?

    cut.py       which positions of the sequence does a device have?
    block.py     attention of some queries to some keys, in parts that can be added up, and its gradient
    ring.py      keys and values go around the devices
    exchange.py  keys and values are gathered; or devices exchange parts of the sequence for heads

All of it is for functions that are manual over the axis (`jax.shard_map`): arrays are what one device holds. Every form is exact: results and gradients are those of attention on one device.
"""
