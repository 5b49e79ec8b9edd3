"""OpenAI's interface over `shardlib.serving.hosting`, with FastAPI and uvicorn (extra `serve`).

settings.py   what whoever starts the server may change
faults.py     what is answered where something is wrong
guard.py      who may ask, and how much
catalog.py    models and adapters, by the names that requests have for them
bodies/       what is asked, as JSON has it
asking/       from there to what an engine is asked
replies/      what is answered: as a whole and as events, as JSON has it
routes/       the places of the interface, a file for each resource
watching.py   figures for Prometheus and for the page
page.py       a page for people
app.py        all of it as one application
server.py     the process: connections, signals, drain
"""
