"""The loss of a whole set of rows during training, exactly, however many rows there are.

    settings = Settings(validation=Validation(data=held_out, every=200))

asked.py       what is to be validated, and how often
batches.py     a set of rows in batches, the last of them with the rows that are left
combining.py   metrics of batches put together to those of the set
validator.py   a program that validates
"""

from __future__ import annotations

from shardlib.training.validation.asked import Validation

__all__ = ["Validation"]
