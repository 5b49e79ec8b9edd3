"""From what a body says to what an engine is asked.

prompts.py        texts and tokens of a body as prompts
conversations.py  messages as a prompt
tools.py          functions that an answer may call, or has to
forms.py          the form that an answer is to have
checks.py         fields that are no answer's
sampling.py       how tokens are chosen
requests.py       all of it together: requests for the engine
"""
