"""What crosses between islands, when, and in what form: values, free of JAX.

A plan says how one island trains. Its *exchange* says how islands meet over slow links:

    values.py        all that plans have, by their words; Exact
    diloco.py        DiLoCo: apart, and an outer update every so many steps
    gossip.py        Gossip: averages with neighbours
    compressed.py    Compressed: gradients of every step, smaller
    compressors.py   PowerSGD, TopK, Quantised, Sign: what they send
    asynchronous.py  Asynchronous: over a parameter server; no decision of a plan
    wires.py         dtypes of what crosses, and their bytes
    checks.py        numbers out of range
    reading.py       from what users pin ("diloco:2:100", a mapping, a value) to a value
    spelling.py      and back
"""
