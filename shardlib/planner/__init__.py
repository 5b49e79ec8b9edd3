"""The plan, the space of candidates, the search and questions about its answer; no JAX.

answers.py        values that answer questions about a plan
assembly.py       from a priced candidate to a plan
bounds.py         lower bounds of memory and step time
findings.py       rules of thumb about a finished plan
incumbents.py     prices of rows, and the best plans priced so far
layouts.py        layouts of parameters and main activations
no_plan.py        why there is no plan
plan.py           the plan: a frozen value with JSON
priced.py         a space of plans, priced by branch and bound
questions.py      questions that search again: why not, what if
scaling.py        scaling curves, and plans for a changed machine
search.py         the fastest plan that fits, a ranking, and the source of answers on every plan
space.py          the candidates
stored.py         the contents of a plan: candidates, activations, trials, dtypes
workload.py       a problem prepared for pricing
"""
