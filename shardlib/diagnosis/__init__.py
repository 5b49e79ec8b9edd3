"""Why there is communication in a function: `shardlib.why`, of any function, planned or not.

program.py      a function, traced and lowered with shapes
shardings.py    Shardy's shardings of every value, and where two of them meet
child.py        the process that compiles
source.py       source lines, and what values are called there
rows.py         a row per collective: line, shardings, bytes, seconds, cause
edits.py        edits of a program, made while it is traced, and lines that annotate parameters
cures.py        edits that may remove communication
peak.py         values that live at the peak of memory
diagnose.py     `why`: all of it
report.py       text, JSON, pages, cards, annotations
commands.py     `shardlib why`
"""
