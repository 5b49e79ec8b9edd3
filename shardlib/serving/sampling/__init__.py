"""The next token of each row, from logits.

choices.py    how each row is to be chosen, as arrays
edits.py      logits are changed before a choice: bias, penalties, tokens that are left out
choose.py     the choice, and logarithms of probabilities
"""
