"""What a microbatch contributes to the loss of the whole batch, and the program that computes
it.
"""
