"""A plan as text, tables, pages and pictures: functions of a plan, which its methods call.

changes.py    differences between two plans, as text and as numbers
elements.py   figures and tables as text
markup.py     HTML and SVG from templates, and cards of notebooks
pages.py      a plan, or two side by side, as a web page; its pictures; a scaling curve
text.py       the explanation of a plan as text
timelines.py  the step of a pipeline as a picture, and traces of a step
"""
