"""Colours flow through the graph: which dims are one index, and where a layout must change."""
