"""The training loop, the folder of a run, and what is measured on the way."""
