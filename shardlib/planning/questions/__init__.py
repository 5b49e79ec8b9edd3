"""How answers are found: the same problem is searched again on a changed machine or under changed
pins.
"""
