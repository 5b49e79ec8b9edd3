"""How each family of primitives carries rows of the batch; a family a file."""
