"""The best of several plans by what the compiler makes of them, and what there is to say of it."""
