"""Programs that serve: a traced forward pass, one token at a time, over a cache of keys and values.

    forward(model, tokens [1, 1]) -> logits    traced once, for one token of one row
    each call of `attention`                   writes the token's keys and values to its page, and
                                               attends over the pages of its request
    what depends on the position               an operand in place of an iota, a slice or a table

`jax.vmap` makes of it the program for many tokens, each with its own position and pages: those of
a prompt, one after another, and the next ones of many requests alike (continuous batching). Pages
are shared, so that writing to them is an operation on all tokens at once.

calls.py      which calls of attention a forward pass makes, and what each keeps of a token
positions.py  where a forward pass looks at the position
pages.py      attention over pages
adapted.py    parameters of which some tokens have others
evaluate.py   the forward pass, run again with caches
program.py    the program of so many tokens
"""
