"""Colours flow through the graph: which dims are one index, and where a layout must change.

colours.py       colours
contractions.py  how the operands of a contraction are sharded while it runs
ties.py          ties between dims
"""
