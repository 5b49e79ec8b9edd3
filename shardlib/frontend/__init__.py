"""The steps of the page `shardlib.compiler`, one a file: a model is read and its loss traced
(`traced_model`), the machine is named (`machines`), a plan is chosen that a program can be made of
(`choice`), and lowered (`lowered`); beside them, what else can be asked of a model: a chain of edge
devices (`edge`) and a scaling curve (`scale`).
"""
