"""Predicted cost of a step before anything is compiled: seconds and bytes of many candidate plans
at once.

Reading order: `terms` defines the vocabulary of costs; `facts`, `attention` and `experts` read
a traced step as kernels, loops and live ranges; `framework` and `activations` rewrite it as a
framework profile runs it; `roofline` and `collectives` have the rates of chips and links; `items`
and `memory` turn the step into separable terms; `tables` evaluates those for all degrees; `pricing`
puts them together.

Terms:

colour       dims of all arrays that are sharded together (`shardlib.propagation.colours`)
choice       the colours that the mesh axes shard
spec         per dim the kinds of mesh axes that shard it: batch, tensor, context, expert
degrees      sizes of the mesh axes with a number of microbatches: what divides an amount; many
             candidates share them
item         a separable part of a step; items with equal `key` have equal costs
term         an amount of FLOPs or bytes of the whole program, with the axes that divide it
layer group  the loops of a step over the same layers
segment      the layer group of an item; `OUTSIDE_LAYERS` and `INSIDE_LAYER`
outside      of the layers: embedding, head and loss
ends         collectives where a microbatch enters or leaves a pipeline whose stages all compute
             embedding and head
region       the body of a loop or of a branch (`shardlib.graph.Op.region`)
purpose      what a collective is for, in a term: `Transfer.purpose`; with the profile it gives the
             roles of its slots
accumulation groups  groups of microbatches that go through a pipeline one after the other; the
             decision `accumulation` is their number
phase        a loop over layers, or the ops between two of them, in the order of a step
slot         a class of collectives, by kind, group of devices and role
role         the purpose of a collective, which decides whether compute waits for it: block (it
             does), gather and scatter (of parameters and gradients), ring, stage ...
measure      a function of the degrees, such as the seconds of one kernel; a local fraction is the
             part of an amount that one device has
tally        coefficients of measures, by `Quantity` of a step and by slot; a `Pricer` tallies the
             terms of a program, and what is in `pricing` makes seconds and bytes of them
plans        candidates that share their decisions and differ in degrees and placement (`Plans`)
curve        figures of a chip under a framework profile (`Curve`), from published runs
collected    collectives of one kind that a compiler merges: "together", or "apart" where not
micro        the number of microbatches (in `shardlib.lowering` the index of one)
stack        the slices of a value for all layers of a loop, in one array
corner       a remat policy for each layer group, for all of its layers

activations.py    rewrites of a step for a framework profile: 8-bit and half-precision products,
                  values saved for the backward pass
attention.py      fused attention: cores of attention as one kernel each
collectives.py    seconds of a collective on the links of its mesh axes
experts.py        experts with tokens routed between devices
facts.py          facts of a traced step: kernels, loops over layers, live ranges
framework.py      framework profiles and abilities: their fields, and XLA's; intervals of step times
                  from published runs
items.py          items: the separable parts of a step, each with the terms of its cost
memory.py         items of memory: gathered parameters, live buffers, stored parameters
pricing.py        seconds and bytes of candidate plans from the tables: the estimate of a step
roofline.py       rates that a machine reaches: rooflines, efficiencies, learned corrections
stages.py         meshes with their placements, and pipeline stages, as arrays
tables.py         tables of the terms of many items for all degrees of parallelism
terms.py          the vocabulary of costs: items, terms, degrees of parallelism
variants.py       prices of mixed remat policies, offloading, collective matmuls
"""
