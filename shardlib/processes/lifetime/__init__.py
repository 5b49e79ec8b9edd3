"""Processes that do not outlive whoever started them, and who a process is.

kin.py      starts them: a compiler, a run under a supervisor, the processes of a launcher
child.py    what each becomes first: on Linux the kernel then ends it with its parent
guard.py    ends what they have started in their turn, and does so where the kernel does not help
who.py      which process is that, of which machine, and does it live?
"""
