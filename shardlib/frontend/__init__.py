"""The steps of the page `shardlib.compiler`, one a file: arguments are checked (`arguments`), a
model is read and its loss traced (`traced_model`), the machine is named (`machines`), a plan is
chosen that a program can be made of (`choice`; `compiled_choice` has the compiler choose), and
lowered (`lowered`, with the loss of its evaluations, `evaluation`); beside them, what else can be
asked of a model: a chain of edge devices (`edge`) and a scaling curve (`scale`).

Planning loads nothing that lowers, compiles or verifies.

choice.py        A plan for a traced model
gradients.py     `shardlib.value_and_grad`
islands.py       several islands
marked.py        A step that marks its losses with `shardlib.value_and_grad`, planned and lowered
                 by them
model.py         are the arguments of the public functions what they should be? Asked before
                 anything is traced
own_layouts.py   what becomes of the layouts that a program brings along
plain_jax.py     A plan as a file of plain JAX that needs no shardlib
step_program.py  A step, compiled for the mesh of a plan
steps.py         any step that a user wrote
verified.py      A plan, or a program, against what the compiler makes of it, for one island or
                 for several
"""
