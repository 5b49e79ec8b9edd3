"""Verification of plans with the real compiler: ahead of time, without the hardware.

hlo.py        a reader of optimised HLO
isolation.py  compilation in a child process, which a failing compiler ends instead of this one
report.py     the report of a verification
timelines.py  measured pipeline stages, and steps in a profile
traffic.py    collectives of a compiled program: how often, how large, and why
verify.py     verification of a plan with the real compiler
"""
