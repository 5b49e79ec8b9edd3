"""Colours flow through the graph: which dims are one index, and where a layout must change.

ties.py           which dims an op, an input or a name ties together
colours.py        the classes of dims that come of it
pieces.py         fused dims: several things side by side
assignment.py     which colours are sharded, and so every dim
contractions.py   how operands of a contraction are sharded
head_sharding.py  how heads of attention are shared out
placements.py     where the lowering pins layouts of activations

"""
