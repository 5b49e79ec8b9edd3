"""A loop over layers as a pipeline.

A chunk of layers is the unit of work: with v chunks per stage, chunk c of stage s has the layers
after those of chunk c of stage s - 1, and chunk c + 1 of stage 0 follows chunk c of the last stage.
In every tick each stage runs one chunk forward for one microbatch and one chunk backward for
another, and sends its results to its neighbours by one collective-permute per direction. Ticks run
in lockstep: some forward only, then both, then backward only, which takes the time of the ideal
schedule.

Only the ticks of the layers are manual, and over the stage axis alone; the parts before and after
the loop (embedding, head, loss) are partitioned automatically, with the stages as one more axis
that shards the sequence, so that they are neither repeated by every stage nor computed by one
alone. Layers keep the plan's layouts over the other axes.

layers.py     parts that both forms of a pipeline share
lockstep.py   a pipeline as one program for all devices (SPMD)
per_stage.py  per-stage programs (MPMD)
stage.py      the work of one stage in one tick
"""
