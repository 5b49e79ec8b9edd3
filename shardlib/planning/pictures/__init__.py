"""A plan as HTML, and its timelines as pictures and traces.

html.py           a plan as a web page
report/           the pictures of that page
overview.py      a plan on its machine as an SVG file
compared.py      two plans side by side as a web page
timelines.py      the step of a pipeline as an SVG file or a Perfetto trace
step_trace.py     a step as predicted and as measured, as one Perfetto trace
style_sheets.py   the style sheets and the script, which stand in the files beside it
"""
