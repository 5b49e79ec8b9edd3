"""Verification of plans with the real compiler: ahead of time, without the hardware.

child.py           the process that compiles
hlo.py             readers of optimised HLO
isolation.py       compilation in a child process, which a failing compiler ends instead of this one
recorded_steps.py  steps of a plan in a profile that JAX has recorded
refining.py        the best of several plans by the compiler's figures
report.py          the report of a verification
timelines.py       measured executions and collectives of compiled programs and pipeline stages
verify.py          verification of a plan with the real compiler
"""
