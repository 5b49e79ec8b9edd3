"""OpenAI's interface to an engine.

settings.py   limits, keys, faults, the catalog of models, figures of a running server
bodies.py     requests: read, checked, refused with the reason
app.py        the paths, the answers and the application; `server.py` runs it
"""
