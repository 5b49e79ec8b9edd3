"""What a user holds after compiling: a program, its step, its guards, its evaluation, and what it
refuses.
"""
