"""The second half of a step, after its gradients:

parts.py     what a step is made of
updated.py   the update
"""
