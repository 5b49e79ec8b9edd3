"""The decisions of a plan: their table, their readers, and the pins of users. No JAX; everything
that plans, prices or lowers stands above.

lowerings.py  combinations of decisions that have no lowering
pins.py       pins, their words, and the rules that they must not break
table.py      the table of decisions: legal values, defaults, words, readers
"""
