"""A step that a user wrote, with gradients and optimizers inside, as a problem to be planned.

traced_step.py    the step as a program and a problem
marked_losses.py  the losses that it marks, and what they are given
parts.py          rows of the batch that are put side by side
unmarked.py       gradients that a step takes outside of its marked losses
total_loss.py     the sum of these losses, which is planned
state_roles.py    what each array of the state is, by what the step does with it
"""
