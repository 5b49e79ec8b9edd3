"""The training loop, the folder of a run, and measurements on the way.

callbacks.py   functions called during a run
display.py     the progress of a run, and text of the trained model
fit.py         the training loop, and the training of a byte-level transformer
identity.py    digests of everything that determines the numbers of a run
loggers.py     receivers of the numbers and events of a run
measures.py    losses and metrics, and the load of the machine
rates.py       learning rates scaled with the batch
run.py         the folder of a run
settings.py    settings of a run
states.py      averages of parameters, learning rates, adapters, and changed models
stepping.py    the steps of a run, from the first to the last
supervisor.py  the supervisor, which restarts a run when its process dies
validation.py  the exact loss of a whole set of rows during training
"""
