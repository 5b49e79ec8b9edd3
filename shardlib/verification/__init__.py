"""What the real compiler makes of a plan, against what the plan promised: ahead of time, with none
of the hardware there.

child.py           the process that compiles
hlo.py             compiled programs read
islands.py         islands against their plan
isolation.py       compilation in a process of its own, which a failing compiler ends instead of
                   this one
recorded_steps.py  the steps of a plan in a profile that JAX has recorded
refining.py        the best of several plans by what the compiler makes of them, and what there
                   is to say of it
report.py          what came out of a verification
timelines.py       measured timelines of pipelines
verify.py          what the real compiler makes of a plan, against what the plan promised
"""
