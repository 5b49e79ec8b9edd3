"""The Plan, the space of candidates, its bounds, the search and questions about its answer; no JAX.

plan.py        the plan, a value
workload.py    what is planned; `space.py`: candidates and why there may be none
bounds.py      lower bounds on seconds, `memory_bounds.py` on bytes
priced.py      branch and bound; `search.py`: all of it, with what was left out
assembly.py    from a priced candidate to a plan, with `layouts.py` and `findings.py`
questions.py   why not, what if; `answers.py`: what they return
"""
