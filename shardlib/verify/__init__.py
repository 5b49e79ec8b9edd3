"""What the real compiler makes of a plan, against what the plan promised: ahead of time, with none
of the hardware there.

"""
