"""Islands that are processes of their own, each with its planned, sharded program, and meet over
TCP.

    with servers.join(program, exchange=shardlib.DiLoCo(islands=2, every=100)) as island:
        state = island.start(seed=0)
        for step in range(10_000):
            state, metrics = island.step(state, rows(island.number, step))

place.py      where the outer server is, and which island this is: variables of the environment
joining.py    `join`: what is refused before anything starts
island.py     `Island`: start, step, finish
exchanging.py what an island says to the server, in a thread beside its steps
several.py    the same for an island of several processes
on_device.py  runs of parameters to the host, and outer parameters back
serving.py    `OuterServer`: its process, started again where it ends
launching.py  islands as processes of this machine
"""
