"""The steps of a run, from the first to the last: what it is to do (`task`), streams of batches
(`batches`), losses and metrics (`records`), checkpoints (`saving`), all that it keeps open
(`equipment`), and the loop that does one step after the other (`steps`).
"""
