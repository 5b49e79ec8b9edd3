"""Islands whose outer gradients cross beside their next steps.

    island 0   step 8 | send | step 9   step 10 | arrive | step 11
                          \\  copies from island to island  /
    island 1   step 8 | send | step 9   step 10 | arrive | step 11

call.py      a program of one island that is no step
sending.py   outer gradients of a fragment, and as they cross
arriving.py  the outer update by what has come, and what an island goes on from
flights.py   copies that are on the way
program.py   what a user holds

Each island runs programs of its own alone; what crosses are copies of arrays, which the runtime
makes beside programs. A second program over all devices would hide nothing, since a device runs one
program after another.
"""
