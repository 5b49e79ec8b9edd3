"""The user's loss with the plan's layouts in it: constraints, custom calls replaced, remat, and
contributions of batch shards.
"""
