"""What a step costs, before anything is compiled: seconds and bytes of many candidate plans at
once.

Read from top to bottom: `terms` are the words that costs are written in; `step` reads a traced step
as kernels and live ranges; `profiles` rewrite it as other frameworks run it; `machine` has the
rates of chips and links; `items` turn the step into separable terms; `tables` evaluate those for
every shape; `pricing` puts them together; `estimate` is the value that comes out.

activations.py    what a framework profile changes of a step
attention.py      fused attention
collectives.py    seconds of a collective on the links that its mesh axes lie on
communication.py  the collectives that one candidate runs
estimate.py       the estimate of a step
experts.py        what experts with a capacity compute when tokens are routed between devices
facts.py          what a traced step does
framework.py      A framework profile
items.py          A step as separable items, each with the terms of its cost
layers.py         layer groups
memory.py         gathers of parameters that are stored sharded
pricing.py        seconds and bytes of candidate plans from the tables
roofline.py       what a machine reaches
stages.py         meshes with their places on the links and numbers of microbatches, as arrays
tables.py         the terms of many items added up for every shape of a space
terms.py          the words that costs are written in
variants.py       prices of steps that run otherwise
"""
