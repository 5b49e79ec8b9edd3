"""Seconds and bytes of serving: what a step of prompts and next tokens costs.

served_model.py   what the forward pass of one token reads, computes and keeps
reading_graph.py  the same, from its graph
split.py          what a device has of it where so many share every layer
cuts.py           which dims of the weights are sharded
constants.py      the figures that were learned from published runs
step_price.py     seconds of a step
memory.py         bytes of a device
"""
