"""What is answered.

heads.py   what every object of an answer has, and the tokens that are counted
shapes.py  choices, as each interface writes them
reply.py   an answer: tokens as choices, whole or piece by piece
events.py  an answer as server-sent events, until the client is gone
"""
