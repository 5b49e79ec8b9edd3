"""What is checked before anything is lowered or run: arguments, plans that have no lowering, and
states of other programs."""
