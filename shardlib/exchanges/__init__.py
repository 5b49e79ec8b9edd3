"""What crosses between islands, when, and in what form: values, free of JAX.

A plan says how one island trains. Its *exchange* says how islands meet over slow links:

    values.py    Exact, DiLoCo: frozen, checked when they are made
    asynchronous.py
                 Asynchronous: over a parameter server; no decision of a plan
    reading.py   from what users pin ("diloco:2:100", a mapping, a value) to a value, and back
"""
