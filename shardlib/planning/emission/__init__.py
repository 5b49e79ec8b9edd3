"""The configuration of a training framework, written from a plan that was made for it: one file for
each form, and `emit`, which finds the form of a plan.
"""
