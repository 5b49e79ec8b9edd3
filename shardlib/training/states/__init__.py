"""States of training, read and changed by hand.

average.py  a moving average of the parameters
rates.py    the learning rate and the step that a state says
surgery.py  a state taken over by the program of a changed model
"""
