"""Files and texts that somebody else wrote: read within limits, checked against types, shown
without surprises.

Everything that shardlib reads of a file goes through here. `documents` makes plain data of JSON and
TOML, within limits on size, depth and numbers; `typed` makes values of plain data, by the
annotations of their dataclasses; `shown` makes text of strangers fit for messages, terminals and
web pages.

>>> from shardlib.errors import PlanError
>>> parse_json('{"zero": 1}', "the plan", PlanError)
{'zero': 1}
>>> parse_json('{"zero": NaN}', "the plan", PlanError)
Traceback (most recent call last):
    ...
shardlib.errors.PlanError: the plan is no JSON: NaN is no finite number

confined.py        native code on a stranger's input runs in processes of its own, with limits
confined_child.py  the process of `confined.py`
data.py            types of plain data, by the names that signatures use
"""

from __future__ import annotations

from shardlib.untrusted.data import (
    LIMITS,
    Form,
    Limits,
    construct,
    fit,
    guarded,
    parse_json,
    parse_toml,
    printable,
    read_bytes,
    read_json,
    read_regular,
    read_toml,
    shown,
)

__all__ = [
    "LIMITS",
    "Form",
    "Limits",
    "construct",
    "fit",
    "guarded",
    "parse_json",
    "parse_toml",
    "printable",
    "read_bytes",
    "read_json",
    "read_regular",
    "read_toml",
    "shown",
]
