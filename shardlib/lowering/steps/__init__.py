"""A step that a user wrote, run under a plan.

layouts.py       where every array of the state lives, and what values of the step are pinned to
step_program.py  the compiled step, and the states that it takes
"""
