"""What is asked, as JSON has it: OpenAI's fields, and some of vLLM's.

fields.py      what bodies have in common
prompts.py     prompts, and texts to embed
choosing.py    how an answer is chosen, when it ends, and how it is sent
messages.py    messages of a conversation
tools.py       functions that an answer may call
completion.py  `/v1/completions`
chat.py        `/v1/chat/completions`
embedding.py   `/v1/embeddings`
"""
