"""Models that answer many clients at once: what stands between an engine and a network.

worker.py     a thread that steps an engine, for the event loop that asks it
load.py       how busy an engine is, and who wants to know
stream.py     answers on their way, a bounded number of tokens ahead of who reads them
answer.py     tokens as text, up to a stop string, with their logarithms
tool_calls.py calls of functions, out of the text of an answer
embedding.py  texts as vectors
templates.py  conversations as text, by templates that nobody here trusts
rendering.py  the process that renders them
beside.py     a smaller model that guesses, and adapters
deployment.py     a model with all of that
"""
