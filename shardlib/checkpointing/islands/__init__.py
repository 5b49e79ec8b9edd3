"""States of several islands in checkpoints.

form.py    a training state as checkpoints have it, that of islands over the devices of all
"""
