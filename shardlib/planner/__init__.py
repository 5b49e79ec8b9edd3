"""The plan, the space of candidates, the search and questions about its answer; no JAX.

Terms, in the order of a search:

colour       dims of all arrays that are sharded together (`shardlib.propagation.colours`)
component    colours that some op ties together; costs are sums over components
choice       the sharded colours, with or without sequence parallelism
tally        quantities of a program under a choice, as a matrix times measures of shapes
entry        a mesh with a number of microbatches
pair         an entry under a choice
candidate    in arrays (`Meshes`) a placed entry; alone (`Candidate`) all decisions of one plan
row          a placed entry under a choice
corner       a remat policy for each layer group

answers.py        values that answer questions about a plan
assembly.py       from a priced candidate to a plan
bounds.py         lower bounds on memory and step time
findings.py       rules of thumb about a finished plan
incumbents.py     prices of rows, and the best plans priced so far
layouts.py        layouts of parameters and main activations
no_plan.py        errors where there is no plan
plan.py           the plan: a frozen value with JSON
priced.py         a space of plans, priced by branch and bound
questions.py      questions that search again: why not, what if
scaling.py        scaling curves, and plans for a changed machine
search.py         the fastest plan that fits, a ranking, and the source of every plan
space.py          the candidates
stored.py         the parts of a plan: candidates, activations, trials, dtypes
workload.py       a problem prepared for pricing
"""
