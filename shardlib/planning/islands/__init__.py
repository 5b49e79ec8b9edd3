"""Plans for several islands: one island is planned as any machine is, and what crosses between them
is added.

    fragments.py  which parameters meet together
    meeting.py    what a meeting moves, keeps and takes
    spread.py     the plan of one island as that of all
    room.py       plans from a search for one island, with memory left for meetings
    instead.py    what islands would give where a plan waits for the network
"""
