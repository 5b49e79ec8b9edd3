"""A worker: a planned, sharded program on its own devices, and the servers that it pushes to.

job.py       what is trained, and how another process finds it
computing.py the worker's own programs: gradients, their sum, local steps
loop.py      enter, fetch, compute, push
process.py   the process
"""
