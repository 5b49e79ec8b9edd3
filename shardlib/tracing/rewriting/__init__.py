"""Traced programs run again with a hand on every value: folded into loops, split, rematerialised in
part.
"""
