"""OpenAI's interface over `shardlib.serving.hosting`, with FastAPI and uvicorn (extra `serve`).

settings.py   what whoever starts the server may change
faults.py     what is answered where something is wrong
guard.py      who may ask, and how much
bodies.py     what is asked, as JSON has it
asking.py     from there to what an engine is asked
shapes.py     what is answered, as JSON has it
replies.py    answers as a whole and as events, until the client is gone
routes.py     the places of the interface
watching.py   figures for Prometheus and for the page
page.py       a page for people
app.py        all of it as one application
server.py     the process: connections, signals, drain
"""
