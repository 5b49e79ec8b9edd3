"""A plan that serves: how many devices share a layer, how many requests they answer at a time.

workload.py       what is asked for
pins.py           decisions fixed by hand
space.py          the choices, priced side by side
two_meshes.py     prompts on one mesh, next tokens on another
search.py         the best choice, and the curve of those that nothing beats
estimate.py       what a plan is predicted to do
findings.py       what is worth knowing before a plan is used
serving_plan.py   the plan: a plain value with its JSON
planner.py        the best plan, and questions that search again
text.py, card.py  it as text, and as a card in a notebook
"""
