"""Propagation of colours through a graph: which dims are one index, and where a layout must change.

colours.py       colours: dims of all arrays that some op ties together
contractions.py  layouts of the operands of a contraction while it runs
ties.py          ties between dims, by union-find
"""
