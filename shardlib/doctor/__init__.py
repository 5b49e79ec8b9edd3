"""What is wrong with these hosts, before a run finds out.

    host.py     what one process sees of its host: devices, packages, limits, folders
    hosts.py    what the hosts have not in common, and which of them is at fault
    ports.py    which hosts reach which
    links.py    how fast kernels run on every device, and collectives along the links
    machine.py  the topology with the links as they were measured
    examine.py  all of it, in bounded time: `examine`

Every finding names the host, or the two hosts, that it is about.
"""
