"""How a server answers a stored workload.

workload.py  requests with their times, as a file has them
replay.py    asks a server so, and writes down when tokens came
figures.py   latencies, throughput, and how many answers were in time
"""
