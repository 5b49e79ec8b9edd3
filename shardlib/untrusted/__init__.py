"""Files and texts of strangers: read within limits, checked against types, shown without surprises.

Everything that shardlib reads of a file goes through here. `data` makes plain data of JSON and
TOML, within limits on size, depth and numbers, makes values of plain data by the annotations of
their dataclasses, and makes text of strangers fit for messages, terminals and web pages. `confined`
runs native code on a stranger's input.

>>> from shardlib.errors import PlanError
>>> from shardlib.untrusted.data import parse_json
>>> parse_json('{"zero": 1}', "the plan", PlanError)
{'zero': 1}
>>> parse_json('{"zero": NaN}', "the plan", PlanError)
Traceback (most recent call last):
    ...
shardlib.errors.PlanError: the plan is not valid JSON: NaN is not a finite number

confined.py        native code on a stranger's input, in processes with limits
confined_child.py  the program of such a process
data.py            documents, typed values and text of strangers
"""
