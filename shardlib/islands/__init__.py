"""Islands of devices that train apart and synchronise in an outer step: inside one process, as jobs
that meet over TCP (`servers`), and as clients that keep their rows, with Flower (`federated`).

Each island runs the unchanged program of its own plan on its own devices, so that nothing can cross
inside of a step. What crosses is a second program over the devices of all islands, a *meeting*,
which takes the islands' parameters as they lie, without copies.

checkpoints.py   checkpoints restored as another number of islands, or with another exchange
commands.py      `shardlib launch --islands`
compression.py   gradients that cross between islands in every step, compressed
delayed.py       islands whose outer gradients cross beside their next steps
exchanges.py     how islands meet, as values free of JAX
federated.py     clients of Flower that train on rows of their own
lowering.py      the batch of one of several islands, and the programs of all
meeting.py       the outer step: exchange of parameters, outer gradients, and the update
outer.py         the outer update, and the form in which numbers cross, over any transport
planning.py      plans for several islands, and the traffic between them
program.py       the program of several islands, and its state
servers/         parameter servers, and outer steps over TCP
transfers.py     the order in which parameters cross a link
verification.py  verification of a step and of the meetings
"""

from __future__ import annotations

from shardlib import wings

__all__, __getattr__ = wings.face(__file__, "shardlib.islands")  # pyright: ignore
