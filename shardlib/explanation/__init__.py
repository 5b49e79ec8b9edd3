"""A plan as HTML, curves and Perfetto timelines.

html.py           a plan as a web page
curves.py         a scaling curve as an SVG file
timelines.py      the step of a pipeline as an SVG file or a trace
style_sheets.py   the style sheets, which stand in the files beside it
"""
