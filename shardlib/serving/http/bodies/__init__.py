"""What is asked, as JSON has it: OpenAI's fields, and some of vLLM's.

fields.py      what bodies have in common
choosing.py    how an answer is chosen, when it ends, and how it is sent
completion.py  `/v1/completions`
chat.py        `/v1/chat/completions`
embedding.py   `/v1/embeddings`
"""
