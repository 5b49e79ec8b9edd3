"""Answers as pictures; those of a single plan stand in `shardlib.planning.pictures`.

curves.py         a scaling curve as an SVG file
"""
