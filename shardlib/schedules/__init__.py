"""Pipeline schedules: who does what when. Arithmetic alone: planning prices and draws schedules
with it, lowering makes programs of it.

    orders           tasks of a stage, and how orders are put together
    schedule         the Protocol: order, microbatches in flight, waiting, what is legal
    none, gpipe, one_f_one_b, interleaved, zero_bubble      one schedule each
    table            all of them by name
    timetable        stages in lockstep: which stage works on what at which tick
    simulation       stages that wait for their neighbours alone, task by task
    picture          both as text
"""
