"""The decisions of a plan: their table, their readers, and the pins of users. No JAX; planning,
pricing and lowering import this package, never the reverse.

lowerings.py  combinations of decisions that cannot be lowered
pins.py       pins, their names, and the rules between them
table.py      the table of decisions: legal values, defaults, descriptions, readers
"""
