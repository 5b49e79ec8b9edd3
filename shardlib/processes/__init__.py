"""Processes among themselves: their place in a job, agreement, heartbeats, signals, children
that end with their parent, and the wire between them.

child.py    programs that end with whoever started them, and the guard of their groups
code.py     digests of the code and packages of this process
console.py  several processes that start and end together, on one console
kin.py      processes that end with whoever started them, whatever ended that
machine.py  one CPU as several simulated devices; the folder for what is kept between runs
place.py    the place of a process in its job, its heartbeats and signals
progress.py what takes long, for how long, and the time that is left
values.py   values of a mesh in every process of a job, idle ones included
wire.py     sealed lines and frames of arrays between processes that share a secret
"""
