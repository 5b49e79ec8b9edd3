"""The steps of the public functions: arguments are checked, a model is read and its loss traced
(`model`), a plan is chosen for a machine (`choice`; `verified` has the compiler choose) and lowered
(`lowered`); beside them, steps of the user's own, and plans as plain JAX.

Planning loads nothing that lowers, compiles or verifies.

choice.py        the choice of a machine and of a plan for a traced model
gradients.py     `shardlib.value_and_grad`
lowered.py       the program of a plan for a traced loss
marked.py        the marked losses of a step as models, and the layouts of its state and values
model.py         checks of the arguments of the public functions, and the traced model with the
                 layouts that it brings along, as priced hints or as pins
plain_jax.py     a plan as a file of plain JAX that needs no shardlib
steps.py         steps of the user's own: `compile_step`, `parallelize`
verified.py      verification of plans and programs with the compiler, for one island or for several
"""
