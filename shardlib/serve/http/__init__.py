"""OpenAI's interface to an engine.

settings.py   limits, keys, faults, the catalog of models, figures of a running server
bodies.py     requests: read, checked, refused with the reason
replies.py    answers and streams of events
app.py        the paths and the application; `server.py` runs it
"""
