"""The pictures of a report, each a figure with its words and, behind a click, its table.

svg.py            shapes, colours of mesh axes, and a figure with its caption
machine.py        the machine, its links, and where each mesh axis lies on them
step.py           a step as bars: what devices are busy with, and every kind of collective
pipeline.py       when each stage of a pipeline does what
memory.py         what is live when, from the start of a step to its end
roofline.py       kernels under the roofline of the chip
answered.py       answers to questions that were asked
panels.py         what the script of the page fills
links.py          which parameters and activations cause a collective
tables.py         collectives, parameters and activations, linked to each other
data.py           what the scripts of the page draw: the landscape of plans, arrays as grids
evidence.py       predicted beside compiled beside measured
"""
