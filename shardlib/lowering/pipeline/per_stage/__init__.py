"""Per-stage programs (MPMD): one process drives a pipeline whose stages are programs of their own.

    dealing.py      which layers each chunk has, and how stacks of layers go to the stages and back
    shards.py       what the devices of one stage hold of a global array, without copies
    chunk_work.py   what a stage does with one microbatch, as functions that can be compiled
    prologue.py     what comes before the first microbatch, and after the last: programs over all
                    devices
    compiling.py    all programs of a plan
    around.py       parameters on their way, and the update
    dispatch.py     one step: the programs called in the order of the schedule

One process sees all devices. Each stage has a mesh of its own, the program's mesh with one place
along the stage axis, and compiled programs for forward work, backward work and, where the schedule
does them apart, gradients of weights. A step:

    prologue     over all devices: what the loss makes from parameters alone, the batch in
                 microbatches, model state before each of them
    shards       every stage takes its part of parameters, batch and state; no array is copied
    work         program after program in an order in which none waits for a later one
                 (`shardlib.schedules.orders`, `simulation`); what a chunk leaves is put onto the
                 devices of the next one
    update       over all devices: the sums of gradients of all stages, put together without copies,
                 and the optimizer, which so sees what it sees without stages

Nothing in this loop waits for a device: programs are compiled beforehand, and calls return when the
work is queued. So stages wait for nothing but their neighbours, as in MPMD pipelines (JaxPP,
arXiv:2412.14374), and every stage has as many layers as it is dealt. What a chunk stashes for its
backward pass is kept by name and let go of when the last program that reads it is queued; sums of
gradients are donated from program to program. The last chunk goes forward and backward in one
program where the schedule does one after the other.
"""
