"""What a plan decides: the table of decisions (`table`), how their values are read (`readers`,
`dtypes`), which of them go together (`contradictions`), decisions that a user pins (`pins`), and
the page about them (`page`). No JAX; everything that plans, prices or lowers stands above.

lowerings.py  which decisions have no lowering together
pins.py       pins
table.py      the table of decisions
"""
