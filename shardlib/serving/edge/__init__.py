"""A plan for a chain of unlike devices, run: stages are processes, here or on other hosts.

traced.py   the forward pass as a chain of pieces, and what crosses a cut
cutting.py  what a stage computes: a program of its own, with its part of the weights
stage.py    the process of a stage
places.py   where stages listen, and the secret that they know
workers.py  processes that stages run in
chain.py    stages that are connected, and what goes through them
running.py  a plan, its batches and their results
"""
