"""The places of the interface, a file for each resource.

models.py       `/v1/models`
generation.py   what completions and chat have in common: places, and answers whole or streamed
completions.py  `/v1/completions`
chat.py         `/v1/chat/completions`
embeddings.py   `/v1/embeddings`
status.py       `/health`, `/metrics`, and the page for people
"""
