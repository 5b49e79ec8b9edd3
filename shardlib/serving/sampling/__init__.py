"""The next token of each row, from logits.

choices.py    how each row is to be chosen, as arrays
edits.py      logits are changed before a choice: bias, penalties, tokens that are left out
guides.py     which tokens may come next, where an answer has a form
guided.py     answers of an engine that have one
told.py       what the rows of a step are, and what they tell
choose.py     the choice, and logarithms of probabilities
"""
