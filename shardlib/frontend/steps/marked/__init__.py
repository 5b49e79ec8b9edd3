"""A step that marks its losses with `shardlib.value_and_grad`, planned and lowered by them.

total.py    all losses as one problem, for the search
single.py   each loss as a model with a loss, as `shardlib.compile` has one
planned.py  the step as it is planned: problem, names, what its losses do not allow
lowered.py  each loss as a program, in the place of its call
"""
