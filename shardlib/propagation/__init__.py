"""Propagation of colours through a graph: dims that are one index, and places where a layout
changes.

Terms:

colour       dims of all arrays that some op ties together, and that are sharded together
choice       the colours that the mesh axes shard; it decides the spec of every value
spec         per dim the kinds of mesh axes that shard it: batch, tensor, context, expert
factor       an index of one op; its rule says which factors each dim of its values has
fused dim    several dims concatenated into one, such as queries, keys and values; its pieces

colours.py       colours by union-find, choices, and rules that shard the pieces of fused dims
contractions.py  layouts of the operands of a contraction while it runs, and layout constraints
"""
