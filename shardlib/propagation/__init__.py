"""Propagation of colours through a graph: dims that are one index, and places where a layout
changes.

colours.py       colours: dims of all arrays that some op ties together, by union-find
contractions.py  layouts of the operands of a contraction while it runs

"""
