"""The training loop, the folder of a run, and what is measured on the way.

fit.py           the training loop
settings.py      how a run is kept, watched and judged
validation/      the loss of a whole set of rows, exactly
callbacks/       what a user adds: early stop, best checkpoint, samples
loggers/         TensorBoard, Weights & Biases, MLflow
states/          states read and changed by hand
stepping/        the steps of a run, and streams of batches
run/             the folder of a run
measures/        losses, rates, the load of the machine, profiles
supervisor.py    starts a run again when its process dies
loop.py          training a byte-level transformer on text
byte_program.py  its model, machine and plan
config.py        what an operator may change about it
sampling.py      text that it writes
result.py        what its run found
display.py       what a person sees of a run
notebook.py      the same in a notebook

"""
