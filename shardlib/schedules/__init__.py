"""Who does what when in a pipeline? Arithmetic alone: planning draws schedules with it, lowering
makes programs of it.

orders.py      published schedules: the order in which each stage does its work simulation.py  when
it does it, where stages wait for nothing but their neighbours timetable.py   stages in lockstep:
which stage works on which microbatch and chunk of layers at which tick picture.py     a timetable
as text, a column a tick
"""
