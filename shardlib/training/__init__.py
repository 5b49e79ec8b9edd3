"""The training loop, the folder of a run, and what is measured on the way.

byte_program.py  the program of a byte-level transformer
callbacks.py     what a user adds to a run
display.py       what a person sees of a training run
fit.py           the training loop
loggers.py       where the numbers and events of a run go, beside the lines of JSON in its folder
measures.py      what a run measures of itself
run.py           the folder of a run
settings.py      settings of a run
states.py        states of training, read and changed by hand
stepping.py      the steps of a run, from the first to the last
supervisor.py    the supervisor, which starts a run again when its process dies
validation.py    the loss of a whole set of rows during training, exactly, however many rows
                 there are
"""
