"""What workers and servers say to each other: frames of a JSON header and arrays, over TCP.

frames.py      a frame: its lengths are checked before anything is read
messages.py    what a worker asks, what a server answers
secret.py      who is there: both ends show that they know the secret of the run
door.py        strangers are greeted beside each other, each with one deadline
connection.py  a worker's connection to one server, made again where it breaks
"""
