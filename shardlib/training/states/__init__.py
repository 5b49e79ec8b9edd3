"""States of training, read and changed by hand.

rates.py    the learning rate and the step that a state says
"""
