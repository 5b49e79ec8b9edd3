"""A plan as text, tables, pages and pictures: functions of a plan, which its methods call.

changes.py     what one plan decides and costs differently from another, as text for people
curves.py      A scaling curve as a picture
elements.py    figures and tables for people
emission.py    which form a plan's configuration has, and what its framework has no word for
frameworks.py  the configuration of a training framework, written from a plan that was made for
               it
pages.py       A plan as HTML, and its timelines as pictures and traces
panels.py      the pictures of a report, each a figure with its words and, behind a click, its
               table
text.py        A plan in words and pictures for people
timelines.py   the step of a pipeline as a picture
"""
