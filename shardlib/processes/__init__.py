"""Processes among themselves: their place in a job, agreement, signs of life, signals, and that
none outlives its parent.

child.py   starts a program that ends when whoever started it does
guard.py   ends process groups, and deletes folders, when whoever started or made them is gone
kin.py     processes that end with whoever started them, whatever ended that
place.py   the place of a process
values.py  values of a mesh in every process of a job, those that own no device of the mesh
           included
"""
