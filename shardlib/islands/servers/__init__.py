"""Processes that meet over TCP: parameter servers without a barrier (Downpour SGD), and islands.

    def job():
        return servers.Job(init=init, loss=loss, rows=rows, topology="cpu:2")

    if __name__ == "__main__":
        exchange = shardlib.islands.Asynchronous(workers=3, servers=2)
        trained = servers.train(job, 200, exchange=exchange, devices=2)

Workers and servers are processes of one machine that talk over its loopback address, or Ray
actors:

Servers own equal runs of the elements of all parameters. A message is a frame of a JSON header and
arrays, a question with one answer; `wire.py` has the table. Of what may happen:

- A worker dies: its connections close, the others go on and no longer wait for it; what it had not
  pushed is lost. It is named in `Trained.events`.
- A worker stalls: nobody waits, but for a bound; and for it no longer than `Upkeep.silent_s`.
- A worker comes late, or comes back: its steps count from where the slowest is.
- A server dies: it is started again from its checkpoint, and workers, which ask again until it
  answers, push once more what it had not answered. What it had applied since the checkpoint is
  lost. A push that comes twice is applied once.
- Somebody else connects, or sends what is not a frame, not a message or not finite: refused, named.

crew.py            the processes of a run
island.py          islands that are processes of their own, each with its planned, sharded
                   program, and meet over TCP
joining.py         `join`
processes.py       the processes of servers
relay.py           A slow link of our own
rounds.py          rounds of islands that are processes of their own
server.py          a parameter server
service.py         a server, whatever it serves: answers, connections, the file of its checkpoint
starting.py        training with workers and parameter servers: processes of this machine, or
                   Ray actors
wire.py            what workers and servers say to each other
worker.py          A worker
worker_process.py  the process of a worker
"""

from __future__ import annotations

from shardlib import wings

__all__, __getattr__ = wings.face(__file__, "shardlib.servers")  # pyright: ignore
