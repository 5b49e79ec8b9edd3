"""What is checked before anything is lowered or run: plans that have no lowering, and states of
other programs."""
