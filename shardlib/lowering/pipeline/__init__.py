"""How does a loop over layers become a pipeline?

    cut.py         a traced loss -> what comes before the loop, the loop, and what comes after it
    chunk.py       some layers of the loop as a function, and what its backward pass keeps
    gathered.py    weights of the layers that are gathered before the ticks, and whose gradients are reduced after them
    ends.py        the same for weights outside of the layers: embedding, head
    stage.py       what every stage does in a tick, and what hops to its neighbours
    sums.py        where gradients are summed up over microbatches, and what the sums become
    ticks.py       all ticks of a step as one program: loss and gradients
    build.py       a plan's pipeline for a traced loss
    programs/      stages as programs of their own, in place of ticks

A chunk of layers is the unit of work: with v chunks a stage, chunk c of stage s holds the layers after those of chunk c of stage s - 1, and chunk c + 1 of stage 0 follows
chunk c of the last stage. In every tick each stage does one chunk forward for one microbatch and one chunk backward for another; what leaves a stage hops to its neighbour by
one collective-permute per direction. Ticks run in lockstep: some that only go forward, then both ways, then only backward, which takes the time of the ideal schedule.

Only the ticks of the layers are manual, and over the stage axis alone; what comes before and after the loop (embedding, head, loss) is partitioned automatically, with the
stages as one more axis that cuts the sequence, so that it is neither computed by every stage nor by one alone. Layers keep the plan's layouts over the other axes.
"""
