"""How does a loss depend on the rows of its batch? Two traces of it, for different numbers of rows,
are walked side by side (`analysis.py`); what is known of every value (`kinds.py`) follows from its
operands by rules, one table for each kind of operation.
"""
