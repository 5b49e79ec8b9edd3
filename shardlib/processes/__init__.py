"""Processes among themselves: their place in a job, agreement, heartbeats, signals, and children
that end with their parent.

child.py    a program that ends when whoever started it does
code.py     digests of the code and packages of this process
devices.py  one CPU as several simulated devices
guard.py    ends process groups, and deletes folders, when whoever started or made them is gone
kin.py      processes that end with whoever started them, whatever ended that
place.py    the place of a process in its job, its heartbeats and signals
values.py   values of a mesh in every process of a job, idle ones included
"""
