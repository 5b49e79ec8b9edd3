"""The folder of a run: who owns it, what is trained in it, whether that has changed, and how it is
doing.
"""
