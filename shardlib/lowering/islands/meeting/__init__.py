"""What crosses between islands that train apart, and what is made of it:

wires.py     means over islands in the dtype that crosses
updates.py   what a device does at a meeting
meeting.py   a meeting as a compiled program
meetings.py  all of them, as the plan has them
"""
