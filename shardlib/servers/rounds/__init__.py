"""Rounds of islands that are processes of their own: who meets, and what is outer. Free of JAX.

Islands train apart, and send an outer gradient (outer parameters as they last had them, minus their
own) every so many steps. A *round* is about one fragment of the parameters, and has one mean:

    island                                  outer server
    enter                                -> waits for the next round; parameters, momentum, number
    inner steps
    send(round, outer gradient, weight)  -> waits until all that are there have sent, or for
                                            `timeout_s` after the first, with at least `quorum`;
                                            the outer update by d, their weighted mean
                                         <- d, as rounded for the link, and who was in it
    the same update of its own copy, so that theta never crosses again

Both ends do the same sums in the same order, so that outer parameters are alike bit for bit. Whose
round is over, who comes back or comes late enters again, and begins the next with the others.

settings.py   how long a round waits, and for how many
attendance.py who is there, who has sent, when a round closes
outline.py    parameters as one vector; fragments are equal runs of it
packing.py    dtypes of what crosses, as `lowering/islands/meeting/wires.py` rounds
outer.py      outer parameters, their momentum, the update
service.py    from a message to its answer
stored.py     the checkpoint
process.py    the process
"""
