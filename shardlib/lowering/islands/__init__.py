"""Islands that train apart, and synchronise in an outer step.

Each island runs the unchanged program of its own plan on its own devices, so that nothing can cross
inside of a step. What crosses is a second program over the devices of all islands, a *meeting*,
which takes the islands' parameters as they lie, without copies.

compression.py  gradients that cross between islands in every step, compressed
delayed.py      islands whose outer gradients cross beside their next steps
meeting.py      the outer step: exchange of parameters, outer gradients, and the update
program.py      the program of several islands, and its state
"""
