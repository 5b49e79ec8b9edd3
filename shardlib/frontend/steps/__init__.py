"""Any step that a user wrote: `compiled` (`compile_step`, with its `pins`), `step_program` (its
program), `parallel` (`parallelize`), `gradients` (`value_and_grad`), by which it marks its losses,
and `marked`, which plans and lowers these.
"""
