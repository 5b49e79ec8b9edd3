"""Gradient accumulation over microbatches, with gradients reduced in each or once a step."""
