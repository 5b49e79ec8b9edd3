"""A server: what it holds, and what it does with what workers send. Free of JAX.

update.py    a gradient applied: SGD or Adagrad, at a rate by staleness
shard.py     the parameters of a server, their clock, the histogram of staleness
gate.py      who may begin a step: warm start, bound
service.py   from a message to its answer
stored.py    a server's checkpoint
listening.py connections, a thread each
process.py   the process
"""
