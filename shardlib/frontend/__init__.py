"""The steps of the page `shardlib.compiler`, one a file: arguments are checked (`arguments`), a
model is read and its loss traced (`traced_model`), the machine is named (`machines`), a plan is
chosen that a program can be made of (`choice`; `compiled_choice` has the compiler choose), and
lowered (`lowered`, with the loss of its evaluations, `evaluation`); beside them, what else can be
asked of a model: a chain of edge devices (`edge`) and a scaling curve (`scale`).

Planning loads nothing that lowers, compiles or verifies.

"""
