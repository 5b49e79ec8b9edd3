"""Islands that train apart, and meet.

Each island runs the unchanged program of its own plan on its own devices, so that nothing can cross
inside of a step. What crosses is a second program over the devices of all islands, a *meeting*,
which takes the islands' parameters as they lie, without copies:

    state.py     what is carried from step to step: the islands' states, and what is outer
    start.py     what islands start with: what is outer, and random streams of their own
    stacked.py   arrays of islands as one array over all devices, and back
    meeting      what crosses between islands that train apart, and what is made of it
    compression  compressed gradients, which cross in every step
    stored.py    the state as named arrays over all devices, for checkpoints
    halves.py    the halves of a step as programs: gradients, update
    rows.py      the batch of all islands as one for each
    checks.py    what is refused before anything runs
    program.py   what a user holds: init, step, evaluate
    learned.py   what a run has learned, of one island or of several

"""
