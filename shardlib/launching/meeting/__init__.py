"""The processes of a job meet before JAX starts: process 0 listens (`first`), the others say who
they are (`members`), in sealed lines (`wire`), and `roll_call` gives all of them the same answer.
"""
